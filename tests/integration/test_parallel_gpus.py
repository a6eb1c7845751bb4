"""Strategies on GPUs: NCCL, kernels and compiled blocks give one loss curve."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from caramba.data.checkpoint.folder import latest_sharded_state
from caramba.runs.events import read_events
from caramba.train import state_path
from tests.integration.commands import SMALL, caramba, only_run
from tests.integration.test_ranks_started import LIMIT_S, ranks_at_work, started

WITHIN = 2e-2  # bfloat16 products, whose order differs between strategies


def train_on_gpus(folder: Path, cache: Path, *more: str) -> tuple[list[float], list[float]]:
    """Return the held-out losses of 12 steps, and the norms of gradients on record."""
    folder.mkdir()
    words = (
        *("launch", "model=tiny", "train=pretrain", "benchmark=none", "verify=none"),
        *("device=cuda", "train.steps=12", "train.eval_every=12", "settings.instrument=none", *SMALL),
    )
    done = caramba([*words, *more], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [item["values"] for item in read_events(only_run(folder)) if item["event"] == "metrics"]
    losses, norms = ([row[key] for row in rows if key in row] for key in ("val_loss", "grad_norm"))
    return losses, norms


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", ["true", "false"])
def test_strategies_agree_on_two_gpus(tmp_path: Path, cache: Path, compiled: str) -> None:
    ranks = ("parallel.dp=2", "launcher=torchrun", f"train.compile={compiled}")
    ddp, fsdp2 = (train_on_gpus(tmp_path / name, cache, f"parallel={name}", *ranks)[0] for name in ("ddp", "fsdp2"))
    assert ddp
    assert ddp == pytest.approx(fsdp2, abs=WITHIN)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_split_over_two_gpus_trains_as_on_one(tmp_path: Path, cache: Path) -> None:
    """Stages send what the residual stream is in, float32, however narrow the blocks compute; layers that two ranks
    share are trained by FSDP2 besides, compiled as a phase compiles by itself."""
    losses, norms = train_on_gpus(tmp_path / "one", cache)
    stages = train_on_gpus(tmp_path / "stages", cache, "parallel=pipeline", "launcher=torchrun")[0]
    assert stages == pytest.approx(losses, abs=WITHIN)
    heads = ("parallel=fsdp2_tp", "parallel.dp=1", "parallel.tp=2", "launcher=torchrun")
    for name in ("false", "true"):
        more = (*heads, f"parallel.sequence_parallel={name}")
        found, its_norms = train_on_gpus(tmp_path / name, cache, *more)
        assert found == pytest.approx(losses, abs=WITHIN)
        # In a few steps losses hardly show that some weights are not trained.
        assert its_norms == pytest.approx(norms, rel=WITHIN)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_batch_that_was_planned_fits_on_every_rank(strategy: str, tmp_path: Path, cache: Path) -> None:
    words = (
        *("launch", "model=tiny", "train=pretrain", "benchmark=none", "verify=none", "launcher=torchrun"),
        *("device=cuda", f"parallel={strategy}", "parallel.dp=2", "settings.instrument=none", *SMALL),
        *("train.batch_size=auto", "train.steps=24", "train.block_size=128", "plan=refresh"),
        *("model.topology.layers.0.repeat=24", "train.memory_utilization=0.02"),
    )
    done = caramba(list(words), tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_run(tmp_path)
    planned = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]["batch_size"]
    assert ("that 2 ranks share" in planned["reason"]) == (strategy == "fsdp2"), "under ddp they add nothing"
    (speed,) = [item for item in read_events(run) if item["event"] == "speed"]
    assert speed["peak_bytes"] <= 1.1 * planned["measured"]["target_bytes"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_sharded_run_that_two_gpus_stopped_goes_on_with_one(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, shrunk = shrink(tmp_path, cache, "cuda", monkeypatch, steps=1200)
    assert shrunk == pytest.approx(whole, abs=WITHIN)
    assert whole[-1] < whole[0] - 10 * WITHIN, "a curve that falls, or it says nothing"


def shrink(
    folder: Path, cache: Path, device: str, monkeypatch: pytest.MonkeyPatch, steps: int = 120
) -> tuple[list[float], list[float]]:
    """Return the held-out losses of one process, and of two ranks that SIGUSR1 stops with one that goes on.

    There must be steps enough that the signal, sent when the first metrics are on record, comes before the last.
    """
    words = (
        *("launch", "model=tiny", "train=pretrain", "benchmark=none", "verify=none", f"device={device}"),
        *(f"train.steps={steps}", f"train.eval_every={steps // 4}", "train.save_every=5000"),
        *("train.block_size=64",),
        *("settings.instrument=none", "train.compile=false", *SMALL),
    )
    whole, stopped = folder / "whole", folder / "stopped"
    for place in (whole, stopped):
        place.mkdir()
    ranks = ("--standalone", "--nproc-per-node", "2", "-m", "caramba", *words, "parallel=fsdp2")
    with started([*ranks, "train.batch_size=4"], stopped, cache, "torch.distributed.run") as process:
        os.kill(ranks_at_work(process, stopped)[1], signal.SIGUSR1)
        process.wait(LIMIT_S)
    said = (stopped / "log.txt").read_text()
    assert "stopped by SIGUSR1; continue with: caramba resume" in said, said
    run = only_run(stopped)
    place = latest_sharded_state(state_path(run, "pretrain"))
    assert place is not None
    assert 0 < int(place.name) < steps
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    for command, place in (
        ([*words, "train.batch_size=8"], whole),
        (["resume", str(run)], stopped),
    ):
        done = caramba(command, place, cache)
        assert done.returncode == 0, done.stdout + done.stderr
    decisions = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
    reason = decisions["gradient_accumulation_steps"]["reason"]
    assert "began with 2 ranks and resumes with 1" in reason
    curves = []
    for one in (only_run(whole), run):
        events = [json.loads(line) for line in (one / "events.jsonl").read_text().splitlines()]
        held = [event for event in events if "val_loss" in event.get("values", {})]
        assert [event["step"] for event in held] == [steps * part // 4 for part in (1, 2, 3, 4)]
        curves.append([event["values"]["val_loss"] for event in held])
    return curves[0], curves[1]
