"""One process trains by itself wherever it lies, a SLURM job of several tasks included."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

from caramba.config.parallel import ParallelConfig
from caramba.train.strategies import SINGLE, JoinedRanks, strategy_arguments


def test_a_process_in_a_slurm_job_is_no_task_of_lightnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traps: a job with --ntasks is refused, and a task of somebody's step that is not the first writes no metrics."""
    job = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x", "SLURM_PROCID": "1"}
    for name, value in {**job, "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with pytest.raises(RuntimeError, match="--ntasks=2"):
        pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    places, who = strategy_arguments(ParallelConfig(), SINGLE, torch.device("cpu"))
    trainer = pl.Trainer(accelerator="cpu", **places, plugins=who, logger=False, enable_checkpointing=False)
    connector = trainer._accelerator_connector
    assert isinstance(connector.cluster_environment, JoinedRanks)
    assert (trainer.world_size, trainer.global_rank, rank_zero_only.rank) == (1, 0, 0)
