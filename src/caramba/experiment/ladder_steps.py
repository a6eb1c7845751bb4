"""Training steps of one row of the ladder: fresh weights, the row's own means, and what the steps took."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from caramba.config.benchmark import LadderConfig
from caramba.config.estimate import estimate_phase, model_cost
from caramba.config.model import ModelSpec
from caramba.config.train import PhaseConfig
from caramba.experiment.fit_apart import fit_apart
from caramba.experiment.planning import Stopwatch
from caramba.experiment.session import Session
from caramba.infer.nll import windowed_nll
from caramba.layer import attention_backends
from caramba.model import Model, build_with_random_weights
from caramba.ops.backend import without_kernels
from caramba.runtime import AttentionChoice, MemoryMeter, seed_process
from caramba.train import FitOutcome

LOGITS = 2**27  # elements of one batch of the held-out loss
PLAIN_ATTENTION = AttentionChoice(("math",), False, "the ladder's rows before flash", uses_varlen=False)


@dataclass(frozen=True)
class LadderSteps:
    """How a row's steps are taken: the phase's keys, which surroundings are on, and how many sequences.

    `twin` is 0 but for runs that differ from a row's in rounding and in random numbers (dropout, stochastic rounding),
    each with a number of its own.
    """

    keys: dict[str, Any]
    is_flash: bool
    has_kernels: bool
    batch_size: int
    accumulation: int
    n_steps: int
    twin: int = 0


@dataclass(frozen=True)
class Taken:
    """What steps took: seconds of each optimiser step, peaks of memory, MFU per token/s, the held-out loss."""

    seconds: tuple[float, ...]
    peak_bytes: int
    peak_allocated_bytes: float | None
    mfu_per_tok_s: float | None
    train_loss: float
    val_loss: float | None


def take_steps(
    session: Session, config: LadderConfig, spec: ModelSpec, steps: LadderSteps, *, fresh: Model | None
) -> Taken:
    """Train a fresh model for a row's steps through `fit`, as any phase is trained.

    Args:
        fresh: whose weights a copy begins with; it is then evaluated on held-out text. Without, a stand-in is timed.

    Raises:
        ConfigError: the device cannot do what the row asks for.
        OutOfMemory: the batch does not fit.
    """
    phase = PhaseConfig.model_validate(
        {
            "phase": "pretrain",
            "trains": "student",
            "steps": steps.n_steps,
            "batch_size": steps.batch_size,
            "gradient_accumulation_steps": steps.accumulation,
            "block_size": config.block_size,
            "scheduler": config.scheduler,
            "warmup_steps": int(config.lr_warmup_ratio * steps.n_steps),
            "lr": config.lr,
            "float8_min_width": config.float8_min_width,
            **steps.keys,
        }
    )
    plan = session.plan(phase, "ladder", spec.embedder.d_model)
    phase = phase.model_copy(update={"lr": plan.value("lr")})
    torch.compiler.reset()
    seed_process(session.manifest.seed, steps.twin)  # draws alone; the order of the data has its own
    meter = MemoryMeter(session.device)
    meter.start()  # which also gives back what the row before it left
    if fresh is None:
        model = build_with_random_weights(spec, session.device).train()
    else:
        model = copy.deepcopy(fresh).to(session.device).train()
        if steps.twin:
            move_by_one_ulp(model, steps.twin)
    watch = Stopwatch(session.device, steps.n_steps, 1)
    with tempfile.TemporaryDirectory() as folder, _surroundings(session, steps):
        outcome = fit_apart(
            session,
            phase,
            plan,
            model,
            Path(folder),
            seed=session.manifest.seed,
            callbacks=[watch],
            flops_per_token=estimate_phase(phase, model_cost(spec), None).flops_per_token,
        )
    peak = meter.peak_bytes()
    return Taken(
        tuple(watch.seconds),
        peak,
        outcome.measured.get("peak_allocated_bytes"),
        _mfu_per_tok_s(outcome),
        outcome.loss,
        None if fresh is None else _held_out_loss(session, config, model),
    )


@torch.no_grad()
def move_by_one_ulp(model: Model, seed: int) -> None:
    """Move every weight to the next number of its type, up or down randomly: a change as small as rounding is."""
    weights = list(model.parameters())
    draws = torch.Generator(weights[0].device).manual_seed(seed)
    for weight in weights:
        up = torch.rand(weight.shape, generator=draws, device=weight.device) < 0.5
        weight.copy_(torch.nextafter(weight, torch.where(up, torch.inf, -torch.inf).to(weight.dtype)))


@contextlib.contextmanager
def _surroundings(session: Session, steps: LadderSteps) -> Iterator[None]:
    """Attend by plain products, and run no kernel of ours, until the ladder has come to them."""
    choice = session.attention if steps.is_flash else PLAIN_ATTENTION
    unattached: AbstractContextManager[Any] = (
        contextlib.nullcontext() if steps.has_kernels else without_kernels()
    )
    with attention_backends(session.device, choice), unattached:
        yield


def _mfu_per_tok_s(outcome: FitOutcome) -> float | None:
    measured = outcome.measured
    return measured["mfu"] / measured["tokens_per_s"] if "mfu" in measured else None


def _held_out_loss(session: Session, config: LadderConfig, model: Model) -> float:
    """Return the loss of the trained weights on held-out windows, computed in float32 for every row."""
    per_batch = max(1, LOGITS // (config.block_size * model.spec.embedder.vocab_size))
    found = windowed_nll(
        model.to(session.device).float(),
        session.windows("val", config.block_size),
        windows=config.val_windows,
        batch_size=min(per_batch, 16),
        device=session.device,
    )
    return found.mean


def spread(values: tuple[float, ...] | list[float]) -> tuple[float, float, float]:
    """Return the median of values and the range of their middle 60%."""
    p20, median, p80 = (float(value) for value in np.percentile(values, [20, 50, 80]))
    return median, p20, p80
