"""Strategies on GPUs: NCCL, kernels and compiled blocks give one loss curve."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).parents[2] / "scripts" / "bench" / "scaling.py"
WITHIN = 2e-2  # bfloat16 products, whose order differs between strategies


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("compiled", [True, False])
def test_strategies_agree_on_two_gpus(tmp_path: Path, compiled: bool) -> None:
    words = [
        "--size",
        "tiny",
        "--batch",
        "4",
        "--block",
        "128",
        "--steps",
        "12",
        "--out",
        str(tmp_path / "a.json"),
    ]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(BENCH), *words, *([] if compiled else ["--no-compile"])],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ddp, fsdp2 = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (ddp["strategy"], fsdp2["strategy"]) == ("ddp", "fsdp2")
    assert ddp["losses"] == pytest.approx(fsdp2["losses"], abs=WITHIN)
