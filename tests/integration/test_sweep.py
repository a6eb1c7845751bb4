"""A sweep of real runs, what is made of it, and a run that is made again from its manifest alone."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from caramba.cli import main
from caramba.data.checkpoint import load_tensors
from caramba.runs import list_runs
from caramba.runs.sweeps import read_sweep, resolve_sweep
from tests.integration.commands import SMALL

pytestmark = pytest.mark.usefixtures("blank_figures")
WORDS = [
    *("-m", "model=tiny", "train=pretrain", "verify=none", "benchmark=none", *SMALL, "device=cpu", "--quiet"),
    *(
        "train.steps=6",
        "train.batch_size=2",
        "train.block_size=32",
        "deterministic=true",
        "train.num_workers=1",
    ),
    *("seed=1,2", "train.lr=1e-3,1e-2"),
]


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("sweep")
    torch.use_deterministic_algorithms(False)


def test_a_sweep_of_real_runs_is_collected_compared_and_run_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(WORDS) == 0
    sweep = read_sweep(resolve_sweep("latest"))
    assert [point.state for point in sweep.points] == ["finished"] * 4
    runs = [sweep.run_of(point) for point in sweep.points]
    assert len(list_runs()) == 4
    assert torch.are_deterministic_algorithms_enabled()

    capsys.readouterr()
    assert main(["collect", "latest", "--csv", "--tex", "--plot"]) == 0
    out = capsys.readouterr().out
    assert "4 of 4 runs finished" in out
    rows = list(csv.DictReader((sweep.folder / "collected" / "summary.csv").open()))
    losses = {row["train.lr"]: row for row in rows if row["metric"] == "loss.pretrain"}
    results = [json.loads((run / "result.json").read_text())["phases"][0]["loss"] for run in runs if run]
    assert float(losses["0.001"]["mean"]) == pytest.approx((results[0] + results[2]) / 2)
    assert losses["0.01"]["n"] == "2"
    assert main(["status"]) == 0
    assert "6/6" in capsys.readouterr().out

    assert runs[1] is not None
    alone = folder / "elsewhere" / "manifest.json"
    alone.parent.mkdir()
    shutil.copy(runs[1] / "manifest.json", alone)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert main(["rerun", str(alone), "--quiet"]) == 0
    again = list_runs()[-1]
    assert again not in runs
    assert again.name.split("-")[2] == runs[1].name.split("-")[2], "the same manifest, hash for hash"
    ours, theirs = (load_tensors(run / "checkpoints" / "pretrain.safetensors") for run in (runs[1], again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    capsys.readouterr()
    assert main(["compare", str(runs[1]), str(again)]) == 0
    text = capsys.readouterr().out
    assert "manifest, A -> B: no differences" in text
    assert "loss.pretrain" in text


def test_a_run_that_fails_is_listed_with_its_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    words = [word for word in WORDS[1:] if "=1,2" not in word and "lr=" not in word]
    assert main([*words, "train.lr=1e30", "train.max_grad_norm=1e30", "train.warmup_steps=0", "name=diverges"]) == 1
    capsys.readouterr()
    assert main(["status", "runs/diverges"]) == 0
    assert "failed" in (text := capsys.readouterr().out)
    assert "the gradient's norm" in text


def test_worker_processes_train_with_loader_workers_of_their_own(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word for word in WORDS[1:] if not word.startswith(("train.lr", "seed"))]
    words += ["seed=1", "launcher=process", "launcher.n_jobs=2"]
    command = [sys.executable, "-m", "caramba.launch", "-m", *words]
    peak_kib = 0
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE) as front_end:
        while front_end.poll() is None:
            status = Path(f"/proc/{front_end.pid}/status").read_text()
            peak_kib = max([peak_kib, *map(int, re.findall(r"VmHWM:\s+(\d+)", status))])
            time.sleep(0.1)
        assert front_end.returncode == 0, front_end.stderr.read()
    monkeypatch.chdir(tmp_path)
    sweep = read_sweep(resolve_sweep("latest"))
    assert [point.state for point in sweep.points] == ["finished"]
    assert 20_000 < peak_kib < 200_000, "the front end holds no torch"
    assert "artifacts" in sweep.log_file(sweep.points[0]).read_text().lower()
