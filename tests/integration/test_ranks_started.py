"""Ranks from the real command line: whoever starts them and whatever ends one, there is one run, and it goes on."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import torch

from caramba.data.checkpoint import load_tensors
from caramba.runs.events import read_events
from caramba.runs.state import run_state
from tests.integration.commands import SMALL, Forked, caramba, only_run, started
from tests.preloaded import RANK

WORDS = (
    *("model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu", *SMALL),
    *("parallel=ddp", "parallel.dp=2", "train.steps=40", "train.eval_every=20"),
    *("train.batch_size=2", "train.block_size=64", "settings.instrument=none", "train.compile=false"),
)
TORCHRUN = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
LIMIT_S = 240.0


def ranks_at_work(process: Forked | subprocess.Popen[str], folder: Path, ranks: int = 2) -> dict[int, int]:
    """Wait until a row of metrics is on record; return {rank: process id}, from what the kernel says of them."""
    limit = time.monotonic() + LIMIT_S
    while not any('"metrics"' in file.read_text() for file in folder.glob("runs/*/*/events.jsonl")):
        assert process.poll() is None, (folder / "log.txt").read_text()
        assert time.monotonic() < limit
        time.sleep(0.02)
    parents, numbers = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = os.readlink(place / "cwd") == str(folder)
            rank = rank_of(place) if is_ours else None
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended, or is not ours to look at
            continue
        if rank is not None:
            numbers[int(place.name)], parents[int(place.name)] = rank, parent
    # What a rank has started, such as workers that load data, has its name and variables too.
    found = {numbers[process]: process for process, parent in parents.items() if parent not in numbers}
    assert sorted(found) == list(range(ranks))
    return found


def rank_of(place: Path) -> int | None:
    """Return the rank that a process of /proc is, None if it is none."""
    if (name := (place / "comm").read_text()).startswith(RANK):
        return int(name.removeprefix(RANK))
    variables = dict(item.split("=", 1) for item in (place / "environ").read_text().split("\0") if "=" in item)
    return int(variables["RANK"]) if {"TORCHELASTIC_RUN_ID", "RANK"} <= variables.keys() else None


def test_ranks_go_on_after_a_kill_or_a_signal_with_the_same_weights(tmp_path: Path, cache: Path) -> None:
    """Traps: a directory per rank under torchrun, a restart from step 0, a save in a signal handler, ranks that hang.

    Rank 1 alone is killed in a run of launcher=torchrun, and alone is asked to stop in one that torchrun started.
    """
    killed, stopped = tmp_path / "killed", tmp_path / "stopped"
    for folder in (killed, stopped):
        folder.mkdir()
    words = [*WORDS, "launcher=torchrun", "launcher.max_restarts=1", "train.save_every=5"]
    torchrun = [*TORCHRUN, "-m", "caramba.launch", *WORDS, "train.save_every=100"]
    with (
        started(["launch", *words], killed, cache) as first,
        started(torchrun, stopped, cache, "torch.distributed.run") as second,
    ):
        os.kill(ranks_at_work(first, killed)[1], signal.SIGKILL)
        killed_at = time.time()
        os.kill(ranks_at_work(second, stopped)[1], signal.SIGUSR1)
        statuses = [process.wait(LIMIT_S) for process in (first, second)]
    texts = [(folder / "log.txt").read_text() for folder in (killed, stopped)]
    assert statuses == [0, 0], "\n".join(texts)
    assert "rank 1 failed first: it was ended by SIGKILL; the others were stopped" in texts[0]
    assert "starting all ranks again from the last saved state (restart 1 of 1)" in texts[0]
    assert "stopped by SIGUSR1; continue with: caramba resume" in texts[1]
    runs = only_run(killed), only_run(stopped)
    logs = {f"torchrun-{attempt}/rank-{rank}.err" for attempt in (0, 1) for rank in (0, 1)}
    assert {str(file.relative_to(runs[0] / "logs")) for file in runs[0].glob("logs/*/*.err")} == logs
    for run in runs:
        events = list(read_events(run))
        starts = [event["time"] for event in events if event["event"] == "run_started"]
        assert len(starts) == 2
        if run == runs[0]:
            assert starts[1] - killed_at < 120, "the rest do not wait for what was killed"
        rows = Counter((item["step"], *sorted(item["values"])) for item in events if item["event"] == "metrics")
        assert max(rows.values()) == 1, "a step is on record once, whatever stopped the run"
        assert run_state(run).state == "finished"
    ours, theirs = (load_tensors(run / "checkpoints" / "pretrain.safetensors") for run in runs)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_rank_stops_with_a_torchrun_that_a_signal_ends(tmp_path: Path, cache: Path) -> None:
    """Trap: torchrun hears no SIGUSR1 and ends at once; its rank went on, and held the run that nobody could resume."""
    words = [word for word in WORDS if not word.startswith("parallel")]
    torchrun = [*TORCHRUN[:-3], "1", "-m", "caramba.launch", *words, "train.save_every=100"]
    with started(torchrun, tmp_path, cache, "torch.distributed.run") as process:
        rank = os.pidfd_open(ranks_at_work(process, tmp_path, ranks=1)[0])
        process.send_signal(signal.SIGUSR1)
        assert process.wait(LIMIT_S) == -signal.SIGUSR1
    assert select.select([rank], [], [], LIMIT_S)[0], "the rank has ended too"
    os.close(rank)
    text = (tmp_path / "log.txt").read_text()
    run = only_run(tmp_path)
    assert "stopped by SIGTERM; continue with: caramba resume" in text
    assert run_state(run).state == "interrupted"
    assert len(list(run.glob("checkpoints/*.state.pt"))) == 1, "it was saved at the end of the step"
    done = caramba(["resume", str(run)], tmp_path, cache)
    assert done.returncode == 0, done.stderr
    steps = Counter((item["step"], *sorted(item["values"])) for item in read_events(run) if item["event"] == "metrics")
    assert max(steps.values()) == 1, "it went on after the last step"
