"""Runs and sweeps through a real SLURM of one node: submitted, requeued by a signal, cancelled, gone on with in place."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from caramba.runs.events import read_events
from caramba.runs.state import read_job, run_state
from caramba.runs.sweeps import list_sweeps, read_sweep
from tests.integration.commands import SMALL, caramba
from tests.integration.slurm_node import SlurmNode, missing

pytestmark = pytest.mark.slurm
WORDS = (
    *(
        "model=tiny",
        "train=pretrain",
        "benchmark=none",
        "verify=none",
        "device=cpu",
        *SMALL,
        "launcher=slurm",
    ),
    *("train.batch_size=2", "train.block_size=64", "settings.instrument=none", "train.compile=false"),
)
LIMIT_S = 240.0


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmNode]:
    if lacking := missing():
        pytest.skip(f"no SLURM here: {', '.join(lacking)} is missing (apt-get install slurm-wlm munge)")
    with SlurmNode(tmp_path / "slurm") as started:
        for name, value in started.variables.items():
            monkeypatch.setenv(name, value)
        yield started


def wait_for(is_so: Callable[[], object], what: str, folder: Path) -> None:
    limit = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > limit:
            logs = "\n".join(file.read_text() for file in folder.glob("runs/*/*/logs/*"))
            raise AssertionError(f"not within {LIMIT_S:.0f} s: {what}\n{logs}")
        time.sleep(0.1)


def kinds(run: Path) -> list[str]:
    return [event["event"] for event in read_events(run)]


def test_a_job_is_requeued_by_a_signal_cancelled_and_resumed_in_place(
    node: SlurmNode, tmp_path: Path, cache: Path
) -> None:
    """Trap: a requeued job that starts from step 0 in a directory of its own. The job has two ranks, and stops and goes
    on with both; a sweep's points have one."""
    folder = tmp_path / "here"
    folder.mkdir()
    refused = caramba(["launch", *WORDS, "cluster.partition=tset"], folder, cache)
    assert refused.returncode == 2
    assert "invalid partition specified: tset" in refused.stderr
    assert "did you mean 'test'? partitions: test" in refused.stderr
    assert not list(folder.glob("runs/*/*")), "nothing is left of a job that was refused"

    words = ["train.steps=150", "train.save_every=1000", "cluster.time=00:10:00", "cluster.cpus_per_task=1"]
    words += ["parallel=ddp", "parallel.dp=2"]
    words.append("settings.instrument=[none,tensorboard]")
    done = caramba(["launch", *WORDS, *words], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = folder.glob("runs/tiny_pretrain/*")
    job = read_job(run)
    assert f"submitted SLURM job {job}: {run}" in done.stdout
    sweep_words = ["-m", *WORDS, "train.steps=2", "seed=1,2", "launcher.n_jobs=1", "cluster.cpus_per_task=1"]
    done = caramba(sweep_words, folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr

    wait_for(lambda: "metrics" in kinds(run), "the first row of metrics", folder)
    node.run("scancel", "--signal=USR2", str(job))
    wait_for(lambda: "run_interrupted" in kinds(run), "stopped by USR2", folder)
    wait_for(lambda: node.run("squeue", "-h", "-j", str(job), "-o", "%T") == "PENDING\n", "queued again", folder)
    again = caramba(["resume", str(run)], folder, cache)
    assert again.returncode == 2
    assert re.search(rf"SLURM job {job} PENDING( \([A-Za-z]+\))? has this run", again.stderr)

    wait_for(lambda: kinds(run).count("run_started") == 2, "the requeued job's start", folder)
    assert read_job(run) == job
    node.run("scancel", str(job))
    wait_for(lambda: node.run("squeue", "-h", "-j", str(job)) == "", "the end of the cancelled job", folder)
    assert run_state(run).state == "interrupted"
    assert kinds(run)[-1] == "run_interrupted"
    state = caramba(["status"], folder, cache).stdout
    assert f"SLURM job {job} CANCELLED" in state
    assert not (run / "requeue").exists(), "a cancelled job is not queued again"

    done = caramba(["resume", str(run)], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: run_state(run).state == "finished", "the resumed run", folder)
    rows = Counter(event["step"] for event in read_events(run) if event["event"] == "metrics")
    assert max(rows) == 150
    assert set(rows.values()) == {1}, "each step is on record once"
    assert len(list((run / "tensorboard").glob("*/events.*"))) == 1, "and in one TensorBoard stream"
    assert json.loads((run / "env.json").read_text())["variables"]["OMP_NUM_THREADS"] == "1"
    decisions = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
    assert decisions["data_parallel"]["value"] == 2
    assert {file.name for file in (run / "logs").glob("rank-*")} == {"rank-0.log", "rank-1.log"}

    (sweep,) = list_sweeps(folder / "runs")

    def ended() -> bool:
        found = read_sweep(sweep)
        found.refresh()
        return found.counts() == {"finished": 2}

    wait_for(ended, "both points of the array", folder)
    again = caramba(sweep_words, folder, cache)
    assert (again.returncode, "2 of 2 points finished" in again.stderr) == (0, True), again.stderr
    assert "submitted" not in again.stdout
