"""Runs with `exp`: one attention trained from scratch at matched parameters, with a checkpoint and a row of its own."""

from __future__ import annotations

import dataclasses

from caramba.config.benchmark import STAGED
from caramba.config.estimate import model_cost, variant
from caramba.config.estimate.variants import feed_forward_widths
from caramba.config.kvcache import KVCacheKind
from caramba.config.manifest import RunConfig
from caramba.console import logger
from caramba.experiment.session import Session
from caramba.experiment.stages import fit_phase
from caramba.model import build_model
from caramba.runs.exit_codes import until_recorded
from caramba.train import drop_state


def train_variant(session: Session, run: RunConfig) -> None:
    """Train the variant that a run names, and measure it under the group's benchmarks, unless it is finished.

    Every variant reads the data from its beginning, so that those of one seed see the same tokens in the same order.
    """
    if run.id in session.ledger:
        drop_state(session.run_dir, run.id)  # a kill may have come before it went
        session.retry_failed_benchmarks(run.id)
        return
    assert run.exp is not None
    assert run.train is not None
    spec = variant(session.manifest.model, run.exp)
    cost = model_cost(spec)
    logger.info(f"{run.id}: {run.exp}, {cost.params:,} parameters")
    model = build_model(spec, seed=run.seed).to(session.device)
    shadow = dataclasses.replace(session, student=model)
    with until_recorded():
        record = fit_phase(shadow, run, run.train)
        row = run.id.replace(".", "_")  # a point separates the parts of a metric's key
        suite = [bench for bench in session.group.benchmarks if not isinstance(bench.config, STAGED)]
        results = session.measure(suite, {row: model.to(session.device)})
        details = {
            **record.phase.details,
            "exp": run.exp,
            "row": row,
            "params": cost.params,
            "d_ff": feed_forward_widths(spec),
            "kv_bytes_per_token": float(cost.kv_bytes_per_token(KVCacheKind.FP16)),
        }
        session.ledger.add(
            dataclasses.replace(
                record,
                phase=dataclasses.replace(record.phase, details=details),
                benchmarks=tuple(dataclasses.replace(item, id=f"{item.id}.{row}") for item in results),
            )
        )
    drop_state(session.run_dir, run.id)
