"""Training of a model that is no stage of the run: a row of a table, which keeps neither weights nor logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback

from caramba.config.train import PhaseConfig
from caramba.experiment.objectives import build_objective
from caramba.experiment.planning import disable_logging
from caramba.experiment.session import Session
from caramba.model import Model
from caramba.runtime import RuntimePlan
from caramba.train import FitOutcome, PhaseData, fit


def fit_apart(
    session: Session,
    phase: PhaseConfig,
    plan: RuntimePlan,
    model: Model,
    folder: Path,
    *,
    seed: int,
    callbacks: Sequence[Callback],
    flops_per_token: float | None = None,
) -> FitOutcome:
    """Train `model` by `phase` on the session's text from its beginning, through `fit`, as any phase is trained.

    Args:
        folder: what the training writes goes there; the caller removes it.
        seed: of the order of the windows.
        callbacks, flops_per_token: as for `fit`.
    """
    assert isinstance(phase.block_size, int)
    return fit(
        build_objective(session, phase, plan, model),
        phase,
        PhaseData(
            session.windows("train", phase.block_size),
            session.windows("val", phase.block_size),
            seed=seed,
            start=0,
        ),
        plan,
        manifest=disable_logging(session.manifest),
        run_dir=folder,
        save_final=lambda: None,
        flops_per_token=flops_per_token,
        callbacks=callbacks,
    )
