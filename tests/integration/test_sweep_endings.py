"""A sweep from the command line to its index: real worker processes on points that end in every way, without training.

The worker is a small program in place of caramba.worker, so that what is tested is who is started, where, and what is
kept of how it ended; test_sweep.py runs the real one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from caramba.cli import main
from caramba.launch.launchers import process
from caramba.runs import lock
from caramba.runs.files import is_locked
from caramba.runs.sweeps import read_sweep, resolve_sweep

PYTHON = sys.executable  # the real one, of which the sweeps here know nothing
WORDS = ("model=tiny", "train=pretrain", "benchmark=none", "device=cpu")
# Ends as the seed says: 0 well, 1 with a failure, 7 by a signal; and writes what a worker would.
WORKER = """
import json, os, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[3]).parent
seed = json.loads((run / "manifest.json").read_text())["seed"]
with open(run / "events.jsonl", "a") as file:
    file.write(json.dumps({"time": 0, "event": "run_started"}) + "\\n")
print("argv", sys.argv[1:], "threads", os.environ["OMP_NUM_THREADS"], "gpu", os.environ.get("CUDA_VISIBLE_DEVICES"))
calls = pathlib.Path("calls.txt")
with open(calls, "a") as file:
    file.write(f"{seed} {run.name}\\n")
first = calls.read_text().split().count(str(seed)) == 1
if seed == 5 and first:
    sys.exit("boom: out of luck")
if seed == 7 and first:
    os.kill(os.getpid(), signal.SIGKILL)
if seed in (11, 13) and first:  # holds its run, as a worker does; the test ends the second of them
    import fcntl
    lock = open(run / ".lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    lock.write(str(os.getpid()))
    lock.flush()
    pathlib.Path(f"locked-{seed}").touch()
    while not pathlib.Path("second start").exists():
        time.sleep(0.02)
    time.sleep(1.0 if seed == 11 else 60.0)
if seed == 9 and first:
    pathlib.Path("waiting").touch()
    time.sleep(60)
rate = json.loads((run / "manifest.json").read_text())["groups"][0]["runs"][0]["train"]["lr"]
value = (rate - 0.003) ** 2 if rate != "auto" else 1.0
loss = {"id": "pretrain", "loss": value, "val_loss": value, "steps": 0}
(run / "artifacts").mkdir(exist_ok=True)
(run / "artifacts" / "report.json").write_text(json.dumps({"metrics": {}, "phases": [loss]}))
(run / "result.json").write_text('{"status": "finished"}')
"""


@pytest.fixture(name="sweep")
def _sweep(tmp_path, monkeypatch, capsys):
    """Run `caramba -m` or another command in an empty folder; return exit status, what was printed, and the index."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(process, "available_cores", lambda: 2)
    program = tmp_path / "worker.py"
    program.write_text(WORKER)
    shell = tmp_path / "python"
    shell.write_text(f'#!/bin/sh\nexec {PYTHON} -S {program} "$@"\n')
    shell.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(shell))

    def run(*words):
        capsys.readouterr()
        status = main(list(words))
        found = read_sweep(resolve_sweep("latest")) if list(tmp_path.glob("runs/*/sweeps/*")) else None
        return status, capsys.readouterr().err, found

    return run


def states(sweep):
    return [point.state for point in sweep.points]


def test_a_sweep_finishes_what_it_can_and_goes_on_where_it_stopped(sweep, tmp_path):
    words = ("-m", *WORDS, "launcher=process", "launcher.n_jobs=2", "seed=1,5,7")
    status, text, found = sweep(*words)
    assert status == 1
    assert states(found) == ["finished", "failed", "interrupted"], "one failure does not stop the others"
    assert "boom: out of luck" in text
    assert found.points[1].error.endswith("boom: out of luck")
    assert "1 of 3 points finished" in text
    log = found.log_file(found.points[0]).read_text()
    assert "threads 1 gpu None" in log
    assert "argv ['-m', 'caramba.worker', " in log
    assert "seed=" not in log, "a worker gets a frozen manifest and never the overrides of the sweep"
    before = {run: (run / "result.json").stat().st_mtime_ns for run in [found.run_of(found.points[0])]}
    status, text, again = sweep(*words)
    assert status == 0
    assert again.folder == found.folder
    assert "resuming" in text
    assert states(again) == ["finished"] * 3
    calls = Path("calls.txt").read_text().splitlines()
    assert sorted(line.split()[0] for line in calls) == ["1", "5", "5", "7", "7"], "what has finished is skipped"
    assert len(set(calls)) == 3, "a run without a result goes on in its own directory"
    assert {run: (run / "result.json").stat().st_mtime_ns for run in before} == before
    assert sweep("resume", str(found.folder))[0] == 0
    assert len(Path("calls.txt").read_text().splitlines()) == 5
    assert (found.run_of(found.points[2]) / "overrides.txt").read_text().splitlines()[0] == "seed=7"
    status, _, anew = sweep(*words, "resume=never")
    assert anew.folder != found.folder, "resume=never starts a sweep of its own"


def test_what_has_a_result_is_not_overwritten_and_one_front_end_drives_a_sweep(sweep):
    words = ("-m", *WORDS, "launcher=process", "seed=1,2")
    _, _, found = sweep(*words)
    failed = found.run_of(found.points[0])
    (failed / "result.json").write_text('{"status": "failed"}')
    with lock(found.folder):
        status, text, _ = sweep("resume", str(found.folder))
    assert status == 2
    assert "is running this sweep; wait for it, or stop it first" in text
    status, _, again = sweep("resume", str(found.folder))
    assert status == 0
    assert len(again.points[0].runs) == 2
    assert (failed / "result.json").read_text() == '{"status": "failed"}'


def test_a_single_run_has_a_process_of_its_own_too(sweep, tmp_path):
    words = (*WORDS, "launcher=process")
    assert [sweep(*words, f"seed={seed}")[0] for seed in (1, 5)] == [0, 1]
    runs = sorted(tmp_path.glob("runs/tiny_pretrain/2*"), key=lambda run: (run / "manifest.json").stat().st_mtime_ns)
    assert [(run / "result.json").exists() for run in runs] == [True, False]
    assert sweep("resume", str(runs[1]))[0] == 0
    assert (runs[1] / "result.json").exists()


def test_on_failure_stop_starts_no_more(sweep):
    status, _, found = sweep(
        "-m", *WORDS, "launcher=process", "launcher.n_jobs=1", "launcher.on_failure=stop", "seed=5,1,2"
    )
    assert status == 1
    assert states(found) == ["failed", "waiting", "waiting"]


FRONT_END = (
    "import sys\nfrom caramba.launch.launchers import process\nfrom caramba.cli import main\n"
    "sys.executable = sys.argv.pop(1)\nsys.exit(main(sys.argv[1:]))"
)


def _wait_for(path: Path) -> None:
    limit = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < limit, path
        time.sleep(0.02)


@pytest.mark.usefixtures("sweep")
def test_sweep_killed_front_end_second_start_waits_for_live_workers(tmp_path):
    """Trap: the second start ended with status 1 and `0 of 3 points failed; try again` while its workers lived.

    The worker of seed 11 finishes under the second front end, and that of seed 13 is killed, so that it runs again.
    """
    words = ["-m", *WORDS, "launcher=process", "launcher.n_jobs=2", "seed=11,13,1"]
    command = [PYTHON, "-c", FRONT_END, str(tmp_path / "python"), *words]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    for seed in (11, 13):
        _wait_for(tmp_path / f"locked-{seed}")
    first.kill()
    first.wait()
    found = read_sweep(resolve_sweep("latest"))
    holders = [int((found.run_of(point) / ".lock").read_text()) for point in found.points[:2]]

    (found.folder / ".index.json.x1y2.part").touch()  # As a kill in the middle of a save leaves it.
    second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert second.stderr is not None
    for holder in holders:
        while f"(waiting for process {holder}, which runs" not in (line := second.stderr.readline()):
            assert line, "it ended"
    (tmp_path / "second start").touch()
    os.kill(holders[1], signal.SIGKILL)
    text = second.communicate(timeout=120)[1]
    assert second.returncode == 0, text
    again = read_sweep(resolve_sweep("latest"))
    assert states(again) == ["finished"] * 3
    assert again.folder == found.folder
    assert not list(found.folder.rglob("*.part"))
    calls = [line.split()[0] for line in (tmp_path / "calls.txt").read_text().splitlines()]
    assert sorted(calls) == ["1", "11", "13", "13"]


@pytest.mark.usefixtures("sweep")
def test_sweep_interrupted_while_it_waits_stops_the_live_worker(tmp_path):
    words = ["-m", *WORDS, "launcher=process", "launcher.n_jobs=1", "seed=11"]
    command = [PYTHON, "-c", FRONT_END, str(tmp_path / "python"), *words]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    _wait_for(tmp_path / "locked-11")
    first.kill()
    first.wait()
    second = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert second.stderr is not None
    while "waiting for process" not in second.stderr.readline():
        pass
    second.send_signal(signal.SIGINT)
    text = second.communicate(timeout=60)[1]
    assert second.returncode == 130, text
    run = read_sweep(resolve_sweep("latest")).run_of(read_sweep(resolve_sweep("latest")).points[0])
    assert not is_locked(run), "the worker was asked to stop, and has ended"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_stops_its_workers_and_can_go_on(sweep, tmp_path, how):
    code = (
        "import sys\nfrom caramba.launch.launchers import process\nfrom caramba.cli import main\n"
        f"sys.executable = {str(tmp_path / 'python')!r}\nsys.exit(main(sys.argv[1:]))"
    )
    words = ["-m", *WORDS, "launcher=process", "launcher.n_jobs=2", "seed=9,1"]
    process = subprocess.Popen(
        [PYTHON, "-c", code, *words],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    limit = time.monotonic() + 120
    while not (tmp_path / "waiting").exists():
        assert time.monotonic() < limit
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
    process.send_signal(how)
    text = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 130, text
    assert "interrupted; resume with: caramba resume runs/tiny_pretrain/sweeps/" in text
    found = read_sweep(resolve_sweep("latest"))
    assert states(found)[0] == "interrupted"
    assert sweep("resume", str(found.folder))[0] == 0
    assert states(read_sweep(found.folder)) == ["finished", "finished"]


def test_a_search_draws_from_what_has_finished_and_goes_on(sweep):
    pytest.importorskip("optuna")
    space = ("train.lr=tag(log, interval(1e-4, 1e-1))", "seed=choice(1,5)")
    words = ("-m", "hydra/sweeper=optuna", *WORDS, "launcher=process", "launcher.n_jobs=1", *space)
    status, text, found = sweep(*words, "hydra.sweeper.n_trials=5", "hydra.sweeper.seed=3")
    drawn = [point.overrides for point in found.points]
    assert any("seed=5" in words for words in drawn)
    assert status == 1, "the first run of seed 5 fails, and is a failed trial"
    assert [point.state for point in found.points].count("failed") == 1
    finished = [point for point in found.points if point.state == "finished"]
    rates = {point.number: float(point.overrides[0].partition("=")[2]) for point in found.points}
    for point in finished:
        assert point.values["value"] == pytest.approx((rates[point.number] - 0.003) ** 2)
    best = min(finished, key=lambda point: point.values["value"])
    assert f"best val_loss.pretrain: {best.values['value']:.6g} at {best.title}" in text
    status, _, again = sweep(*words, "hydra.sweeper.n_trials=7", "hydra.sweeper.seed=3")
    assert (status, again.folder) == (0, found.folder)
    assert [point.overrides for point in again.points[:5]] == drawn
    assert len({tuple(point.overrides) for point in again.points}) == 7, "a search that goes on draws nothing twice"
    assert sweep("resume", str(found.folder))[2] == again
    _, _, anew = sweep(*words, "hydra.sweeper.n_trials=2", "hydra.sweeper.seed=3", "resume=never")
    assert anew.folder != found.folder
    assert [point.overrides for point in anew.points] == drawn[:2], "the same seed draws the same"
