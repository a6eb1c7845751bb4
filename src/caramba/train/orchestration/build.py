"""Building the orchestrator of a phase, with what is refused before it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caramba.config.optimizer import portfolio_bytes, runs_trials
from caramba.config.train import PhaseConfig
from caramba.data.checkpoint.network import spec_of
from caramba.errors import ConfigError
from caramba.runtime import free_bytes, is_main_process
from caramba.train.callbacks.orchestration import Orchestration
from caramba.train.orchestration.orchestrator import (
    DECISIONS,
    Journal,
    Orchestrator,
    choices_to_replay,
    digest_of,
)
from caramba.train.orchestration.trials import TrialData


def build_orchestration(
    phase: PhaseConfig,
    name: str,
    data: Any,
    objective: Any,
    *,
    run_dir: Path,
    per_step: int,
    share: tuple[int, int],
    device: torch.device,
) -> Orchestration:
    """Return the callback that orchestrates a phase.

    Raises:
        ConfigError: its states do not fit, no window is left to score by, or decisions are of another manifest.
    """
    refuse_too_large(phase, sum(p.numel() for _, p in objective.trainable()), device)
    digest = digest_of(
        phase, spec_of(objective.model.spec).model_dump_json(), data.train, data.seed, data.start
    )
    replayed = None
    if phase.orchestrator_decisions is not None:
        path = Path(phase.orchestrator_decisions)
        replayed = choices_to_replay(path, name, digest, phase.orchestrator_strategies)
    windows = None
    if runs_trials(phase):
        windows = TrialData(
            data.train, phase, seed=data.seed, start=data.start, per_step=per_step, share=share
        )
    journal = Journal(run_dir / DECISIONS, name, digest, writes=is_main_process())
    return Orchestration(Orchestrator(phase, journal, windows, replayed))


def refuse_too_large(phase: PhaseConfig, weights: int, device: torch.device) -> None:
    """Check that states and copies of a portfolio fit next to the weights.

    Raises:
        ConfigError: they do not, with the bytes.
    """
    needed, free = portfolio_bytes(phase, weights), free_bytes(device)
    if sum(needed.values()) > free:
        raise ConfigError(
            f"train.orchestrator_enabled: states of the portfolio take {needed['states']:,} bytes and copies for "
            f"trials and rollback {needed['copies']:,}, expected at most the {free:,} free on {device}; use fewer "
            "orchestrator_strategies, or a smaller model"
        )
