from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from caramba.train.throughput import PeakMemory, PhaseProfile, device_peak
from caramba.train.throughput.profile import span


@pytest.mark.parametrize(
    ("steps", "expected"), [(1, (0, 0, 1)), (2, (0, 1, 1)), (3, (0, 1, 2)), (6, (1, 2, 3)), (20, (5, 2, 3))]
)
def test_a_short_phase_is_profiled_too(steps: int, expected: tuple[int, int, int]) -> None:
    assert span(steps) == expected
    assert sum(expected) <= steps


def profile_steps(folder: Path, device: torch.device, steps: int, taken: int) -> PhaseProfile:
    model = nn.Linear(16, 16, device=device)
    profile = PhaseProfile(folder, "pretrain", steps, device)
    profile.start()
    for _ in range(taken):
        profile.begin_step()
        model(torch.ones(4, 16, device=device)).sum().backward()
        profile.end_step()
    profile.stop()
    return profile


def test_the_trace_holds_the_active_steps_and_the_table_their_ops(tmp_path: Path) -> None:
    assert profile_steps(tmp_path, torch.device("cpu"), 6, 6).has_written
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event.get("name", "").startswith("ProfilerStep")}
    assert len(steps) == 3
    with open(tmp_path / "top_ops.csv") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert int(rows["aten::addmm"]["calls"]) == 3
    assert float(rows["aten::addmm"]["cpu_us"]) > 0
    own = [float(row["self_cpu_us"]) for row in rows.values()]
    assert own == sorted(own, reverse=True)
    assert "aten::addmm" in (tmp_path / "top_ops.txt").read_text()
    assert not list(tmp_path.glob("*.part"))


def test_a_phase_that_ends_early_writes_nothing(tmp_path: Path) -> None:
    assert not profile_steps(tmp_path / "none", torch.device("cpu"), 20, 4).has_written
    assert not (tmp_path / "none").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_adds_kernels_and_a_memory_snapshot(tmp_path: Path) -> None:
    device = torch.device("cuda")
    memory = PeakMemory(device)
    memory.reset()
    assert profile_steps(tmp_path, device, 6, 6).has_written
    with open(tmp_path / "top_ops.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["self_device_us"]) > 0
    assert (tmp_path / "memory.pickle").stat().st_size > 1000
    big = torch.empty(2**28, dtype=torch.uint8, device=device)
    del big
    peaks = memory.read()
    assert 2**28 <= peaks["peak_allocated_bytes"] <= peaks["peak_reserved_bytes"]
    assert memory.leaves_room_for(2**27)
    assert not memory.leaves_room_for(2**30)
    assert device_peak(device, "bfloat16", None) is None or device_peak(device, "bfloat16", None) > 1e14
