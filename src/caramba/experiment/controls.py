"""Controls at matched bytes: what else the same teacher, cache bytes and tokens give, each a stage of its own."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from caramba import surgery
from caramba.config.benchmark import BenchmarkConfig, ControlName, ControlsBenchmarkConfig
from caramba.config.kvcache import KVCacheKind
from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.config.surgery import fewer_kv_heads
from caramba.config.topology import attention_configs
from caramba.config.train import BLOCK_PHASES
from caramba.console import logger
from caramba.errors import ConfigError, DataError
from caramba.evaluation.memory import measure as measure_memory
from caramba.experiment.session import Session
from caramba.experiment.stages import fit_phase
from caramba.experiment.surgery import TRANSPLANT
from caramba.infer.agreement import Agreement, agreement
from caramba.model import Model, build_model, load_pretrained
from caramba.result import BenchmarkResult, Metric
from caramba.runs.exit_codes import until_recorded
from caramba.train import drop_state

DISTILLED = "_distilled"


@dataclass(frozen=True)
class Subject:
    """One row of the comparison: a model, the cache it is read through, and the tokens that it trained on since the
    teacher. `kind` None is a forward without a cache; bytes are then those of a 16-bit one."""

    name: str
    make: Callable[[], Model]
    tokens: int = 0
    kind: KVCacheKind | None = None


def measure_controls(session: Session, bench: BenchmarkConfig) -> None:
    """Measure teacher, student and every control on the same held-out windows.

    A finished row is never repeated, and one that failed is tried again.

    A control that this teacher and budget do not allow is a row with the reason; another failure is its stage's error,
    and that of the run where several ranks were training.
    """
    config = bench.config
    assert isinstance(config, ControlsBenchmarkConfig)
    proxy = session.labels.get("proxy")
    logger.subheader(f"controls: {bench.id}" + (f" (proxy: teacher {proxy})" if proxy else ""))
    for subject in _subjects(session, bench.id, config):
        stage = f"{bench.id}.{subject.name}"
        if session.ledger.is_measured(stage):
            continue
        began = time.perf_counter()
        result = BenchmarkResult(stage, config.type)
        try:
            row = _row(session, subject, config)
        except Exception as error:
            if session.ranks is not None and session.ranks.is_training:
                raise  # the other ranks hang in the phase that failed here, or have ended with it
            result = dataclasses.replace(result, **_outcome(stage, subject, error))
        else:
            logger.info(
                f"{stage}: PPL ratio {row['ppl_ratio']:.4f} at {row['kv_bytes_per_token']:g} bytes a token "
                f"({row['kv_ratio']:.2f}x), KL {row['kl']:.4f}, top-1 {row['top1']:.1%}"
            )
            result = dataclasses.replace(result, rows=(row,), metrics=_metrics(row, bench.id))
        session.ledger.put_row(dataclasses.replace(result, seconds=time.perf_counter() - began))


def _outcome(stage: str, subject: Subject, error: Exception) -> dict[str, Any]:
    """Return what a stage records of an error, and say it."""
    if isinstance(error, ConfigError | DataError):  # widths, parts or data that the control cannot have
        logger.warning(f"{stage}: skipped, {error}")
        return {"rows": ({"model": subject.name, "skipped": str(error)},)}
    message = f"{type(error).__name__}: {error}"
    logger.error(f"{stage}: {message}")
    return {"error": message}  # in report.json, and reported as exit status 1 by the worker


def _subjects(session: Session, bench_id: str, config: ControlsBenchmarkConfig) -> list[Subject]:
    teacher, student = session.model_of("teacher"), session.model_of("student")
    found = [Subject("teacher", lambda: teacher)]
    if TRANSPLANT in session.ledger:
        found.append(Subject("student_transplant", lambda: _saved(session, TRANSPLANT)))
    trained = [phase for phase in session.phases() if phase.trains == "student" and phase.steps]
    if trained or TRANSPLANT not in session.ledger:
        found.append(Subject("student", lambda: student, sum(phase.tokens for phase in trained)))
    for name in config.controls:
        if name == "teacher_continued":
            found.append(_continued(session))
            continue
        found.append(Subject(name, lambda name=name: _untrained(session, name)))
        if config.distil:
            tokens = sum(phase.tokens for phase in trained)
            found.append(Subject(name + DISTILLED, lambda name=name: _distilled(session, bench_id, name), tokens))
    return found + [Subject(f"teacher_{kind.value}", lambda: teacher, 0, kind) for kind in config.cache_kinds]


def _row(session: Session, subject: Subject, config: ControlsBenchmarkConfig) -> dict[str, Any]:
    """Measure one subject and the teacher; bytes are counted from cache tensors."""
    session.move_to(session.device)  # Lightning leaves what several ranks trained on the CPU
    teacher, model = session.model_of("teacher"), subject.make().to(session.device)
    found = agreement(
        teacher,
        model,
        session.windows("val", config.block_size),
        windows=config.batch_size * config.num_batches,
        batch_size=config.batch_size,
        device=session.device,
        kind=subject.kind,
        tail_tokens=config.cache_tail_tokens,
    )
    theirs = _bytes_per_token(session, teacher, KVCacheKind.FP16, config.block_size)
    ours = _bytes_per_token(session, model, subject.kind or KVCacheKind.FP16, config.block_size)
    low, high = found.interval or (None, None)
    return {
        "model": subject.name,
        "tokens": subject.tokens,
        "kv_bytes_per_token": ours,
        "kv_ratio": theirs / ours,
        **_losses(found),
        "ppl_ratio": found.ppl_ratio,
        "ppl_ratio_low": low,
        "ppl_ratio_high": high,
        "kl": found.kl,
        "top1": found.top1,
        "windows": len(found.model.window_means),
        "block_size": config.block_size,
        "skipped": None,
    }


def _losses(found: Agreement) -> dict[str, float | None]:
    return {
        "nll": found.model.mean,
        "perplexity": found.model.perplexity,
        "delta_nll": found.delta_nll,
        "delta_nll_standard_error": found.delta_standard_error,
    }


def _bytes_per_token(session: Session, model: Model, kind: KVCacheKind, length: int) -> float:
    vocab_size = session.manifest.model.embedder.vocab_size
    return measure_memory(model, length, 1, kind, vocab_size, session.device)["kv_bytes_per_token"]


def _metrics(row: dict[str, Any], source: str) -> tuple[Metric, ...]:
    name, n, error = row["model"], row["windows"], row["delta_nll_standard_error"]
    units = {
        "tokens": "tokens",
        "perplexity": "",
        "delta_nll": "nats/token",
        "ppl_ratio": "ratio",
        "kl": "nats/token",
        "top1": "share",
        "kv_bytes_per_token": "bytes",
        "kv_ratio": "ratio",
    }
    errors = {} if error is None else {"delta_nll": error, "ppl_ratio": error * row["ppl_ratio"]}
    return tuple(
        Metric(f"controls.{name}.{field}", float(row[field]), unit, n, None, source, errors.get(field))
        for field, unit in units.items()
    )


def _untrained(session: Session, name: ControlName) -> Model:
    """Build a control from the current teacher as surgery leaves it."""
    teacher, student = session.model_of("teacher"), session.model_of("student")
    spec: ModelSpec = student.spec
    if name == "copy":
        elements = sum(layer.dims().cached for layer in attention_configs(student.spec.topology))
        spec = fewer_kv_heads(teacher.spec, elements)
    # Surgery computes in float64, which MPS does not have.
    device = torch.device("cpu") if session.device.type == "mps" else session.device
    model = build_model(spec, seed=session.seed_of("student")).to(device)
    surgery.transplant(teacher.to(device), model, SurgeryConfig.model_validate({"method": name}))
    teacher.to(session.device)
    return model.to(session.device).eval()


def _distilled(session: Session, bench_id: str, name: ControlName) -> Model:
    """Take a control through the student's phases, each a stage that a resumed run does not repeat."""
    phases = [
        (run, phase) for run, phase in session.group.trained if phase.trains == "student" and phase.phase != "pretrain"
    ]
    if not phases:
        raise ConfigError("no run distils the student; add one (train=upcycle, train=blockwise), or set distil: false")
    shadow = dataclasses.replace(session, student=_untrained(session, name))
    for run, phase in phases:
        stage = f"{bench_id}.{name}.{run.id}"
        if name == "random" and phase.phase in BLOCK_PHASES:  # W_q and W_o are random too
            phase = phase.model_copy(update={"trainable": "all"})
        if stage not in session.ledger:
            with until_recorded():
                session.ledger.add(fit_phase(shadow, run, phase, stage=stage))
        else:
            shadow.student = _saved(session, stage)
        # That of a phase on record too: a kill may have come before it went.
        drop_state(session.run_dir, stage)
    return shadow.model_of("student").eval()


def _continued(session: Session) -> Subject:
    """The teacher trained further, by the group's phase with `control: true`."""
    ids = [run.id for run, phase in session.group.trained if phase.control]

    def make() -> Model:
        if not ids:
            raise ConfigError(
                "no run trains the teacher further; add a phase with control: true (train=upcycle has one)"
            )
        return _saved(session, ids[-1])

    return Subject("teacher_continued", make, session.ledger[ids[-1]].phase.tokens if ids else 0)


def _saved(session: Session, stage: str) -> Model:
    return load_pretrained(session.weights_path(stage), device=session.device)[0]
