"""What a sweep refuses before anything starts, where its workers run, and how they are stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time

import pytest

from caramba.cli import main
from caramba.config.parallel import LauncherConfig
from caramba.errors import ConfigError
from caramba.launch import preflight
from caramba.launch.freeze import freeze
from caramba.launch.launchers import process
from caramba.launch.launchers.process import GRACE_S, Job, Pool, make_slots
from caramba.launch.overrides import expand_sweep
from caramba.launch.sweeps.grid import common_name, find_varied, refuse_ranks
from caramba.runs import exit_codes, lock, mint
from caramba.runs.exit_codes import INTERRUPTED, PREEMPTED, TERMINATED

WORDS = ("model=tiny", "train=pretrain", "benchmark=none", "device=cpu")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["seed=1,1"], "points 'seed=1 model=tiny"),
        (["seed=1,2", "resume=runs/x"], "resume=runs/x names one run, and a sweep has many"),
        (["seed=1,2", "launcher.n_jobs=2"], "n_jobs=2 has no meaning for launcher=inline"),
        (["seed=1,2", "launcher=process", "launcher.n_jobs=0"], "launcher.n_jobs"),
        (["seed=interval(1,2)"], "an interval has no finite set of values"),
        (["hydra/launcher=submitit_slurm"], "it would compose again in every job; launcher=slurm submits"),
        (["train.optimizer=glob(nothing*)"], "matches no option of train.optimizer"),
    ],
)
def test_mistakes_of_a_sweep_start_nothing(tmp_path, monkeypatch, capsys, words, text):
    monkeypatch.chdir(tmp_path)
    assert main(["-m", *words, *WORDS]) == 2
    assert text in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_under_torchrun_is_refused(monkeypatch):
    """Every rank would run all points; ranks that sample would even train different ones."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="each of 2 processes would run the whole sweep"):
        refuse_ranks()


def test_a_second_launch_into_one_run_directory_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = mint(freeze(list(WORDS)).manifest, WORDS)
    with lock(run):
        for words in (["resume", str(run)], [*WORDS, f"resume={run}"]):
            assert main(words) == 2
            assert "is running this run; wait for it, or stop it first" in capsys.readouterr().err
    assert sorted(file.name for file in run.iterdir()) == [
        ".lock",
        "env.json",
        "manifest.json",
        "overrides.txt",
    ]


def test_workers_get_their_devices_and_share_of_the_cores(monkeypatch):
    monkeypatch.setattr(process, "available_cores", lambda: 8)
    monkeypatch.setattr(preflight, "available_cores", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def seen(**settings):
        found = make_slots(LauncherConfig(type="process", **settings), 64)
        return [(slot.variables.get("CUDA_VISIBLE_DEVICES"), slot.variables["OMP_NUM_THREADS"]) for slot in found]

    assert seen() == [("3", "4"), ("5", "4")]
    assert seen(n_jobs=4) == [("3", "2"), ("5", "2"), ("3", "2"), ("5", "2")]
    assert seen(devices=(1, "GPU-ab"), threads=3) == [("1", "3"), ("GPU-ab", "3")]
    for asked, each in (("1", "1"), ("16", "4"), ("0", "4"), ("many", "4")):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert seen() == [("3", each), ("5", each)]
    assert seen(threads=3) == [("3", "3"), ("5", "3")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert seen() == [(None, "1")] * 8
    with pytest.raises(ConfigError, match="the runs ask for device=cpu"):
        make_slots(LauncherConfig(type="process", devices=(0,)), 2, "cpu")


@pytest.fixture(name="deaf")
def _deaf(tmp_path, monkeypatch):
    """A job whose worker says that it runs, and when it has got a SIGINT, by which it does not end."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\ntrap 'echo told' INT\necho deaf\nwhile :; do sleep 0.05; done\n")
    program.chmod(0o755)
    monkeypatch.setattr(process.sys, "executable", str(program))
    # A shell's background ignores the one, and nohup the other.
    heard = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in heard.items()}
    yield Job(0, tmp_path, tmp_path / "log.txt")
    for number, handler in before.items():
        signal.signal(number, handler)


def _one_worker():
    return Pool(make_slots(LauncherConfig(type="process", n_jobs=1), 1, "cpu"))


def _said(log, word="deaf"):
    while not log.exists() or f"{word}\n" not in log.read_text():
        time.sleep(0.01)


@contextlib.contextmanager
def _asked_to_stop(deaf, number, on_stop=None):
    """A pool whose one worker runs, at the moment at which a signal has asked for the end; the worker does `on_stop`
    when it hears of it."""
    if on_stop is not None:
        trap = f"trap '{on_stop}' INT USR1"
        (deaf.run_dir / "python").write_text(f"#!/bin/sh\n{trap}\necho deaf\nwhile :; do sleep 0.05; done\n")
    with _one_worker() as workers:
        endings = workers.run(iter([deaf]))
        sender = threading.Thread(target=lambda: (_said(deaf.log), os.kill(os.getpid(), number)))
        sender.start()
        with pytest.raises(KeyboardInterrupt, match=number.name):
            next(endings)
        sender.join()
        yield workers


def test_a_worker_that_will_not_stop_is_killed(deaf, monkeypatch):
    monkeypatch.setattr(process, "_POLL_S", 0.001)
    with _asked_to_stop(deaf, signal.SIGTERM) as workers:
        assert workers.stop(grace_s=0.2) == [-signal.SIGKILL]


def test_a_second_interrupt_kills_at_once(deaf, monkeypatch):
    monkeypatch.setattr(exit_codes, "SAME_PRESS_S", 0.0)
    before = signal.getsignal(signal.SIGINT)
    with _asked_to_stop(deaf, signal.SIGINT) as workers:
        process = workers._running[0].process
        threading.Thread(target=lambda: (_said(deaf.log, "told"), os.kill(os.getpid(), signal.SIGINT))).start()
        start = time.monotonic()
    assert process.returncode == -signal.SIGKILL
    assert time.monotonic() - start < GRACE_S / 2
    assert signal.getsignal(signal.SIGINT) is before


def test_a_terminal_that_closes_leaves_time_to_save(deaf):
    """The shell and the system both send SIGHUP then."""
    with _asked_to_stop(deaf, signal.SIGHUP, "sleep 0.5; echo saved; exit"):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGHUP)).start()
    assert deaf.log.read_text() == "deaf\nsaved\n"


def test_what_saves_has_the_time_that_it_takes(deaf):
    """A stop is answered when a step has ended; only Ctrl-C is not waited for."""
    with _asked_to_stop(deaf, signal.SIGUSR1, "sleep 1; echo saved; exit 75") as workers:
        assert workers.stop(grace_s=0.1, how=signal.SIGUSR1) == [75]
    assert deaf.log.read_text() == "deaf\nsaved\n"


@pytest.mark.parametrize(
    ("sent", "told", "ending", "expected"),
    [
        ("USR1", "USR1", "exit 0", 0),
        ("USR1", "USR1", "exit 75", 75),
        ("INT", "INT", "kill -9 $$", INTERRUPTED),
        ("USR2", "USR2", "kill -9 $$", PREEMPTED),
        ("HUP", "TERM", "kill -9 $$", TERMINATED),
    ],
)
def test_a_single_run_that_is_stopped_ends_as_its_worker_did(deaf, sent, told, ending, expected):
    program = deaf.run_dir / "python"
    program.write_text(f"#!/bin/sh\ntrap '{ending}' {told}\necho deaf > {deaf.log}\nwhile :; do sleep 0.05; done\n")
    number = signal.Signals[f"SIG{sent}"]
    threading.Thread(target=lambda: (_said(deaf.log), os.kill(os.getpid(), number))).start()
    assert process.run_in_process(deaf.run_dir, LauncherConfig(type="process"), "cpu", []) == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_is_ignored_stays_so(number):
    """A shell that runs us in the background ignores SIGINT for us, and nohup SIGHUP."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with _one_worker():
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_signal_while_a_worker_starts_is_not_lost(deaf):
    """Python drops what a handler raises within the callbacks around a fork, which is where this signal comes."""
    armed = [True]
    os.register_at_fork(after_in_parent=lambda: armed and armed.pop() and signal.raise_signal(signal.SIGTERM))
    with _one_worker() as workers:
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            next(workers.run(iter([deaf])))
        process = workers._running[0].process
        workers.stop(grace_s=0.1)
    assert not armed
    assert process.returncode in (-signal.SIGKILL, -signal.SIGINT), "the worker that had started has ended"


def test_a_search_without_m_is_told_so():
    with pytest.raises(ConfigError, match="a search needs -m"):
        freeze(["hydra/sweeper=optuna"])


def test_a_search_reads_its_space_and_settings():
    optuna = pytest.importorskip("optuna")
    from caramba.launch.sweeps.search import read_space, split_settings

    words = ["a=1", "b=tag(log,interval(0.1,1))", "c=int(interval(1,9))", "d=range(1,10,3)", "+e=x,y"]
    rest, settings = split_settings(["hydra/sweeper=optuna", *words, "hydra.sweeper.sampler.seed=7"])
    assert (rest, settings.seed, settings.n_trials) == (words, 7, 20)
    space, kinds = read_space(words, []), optuna.distributions
    assert space.fixed == ["a=1"]
    assert space.distributions == {
        "b": kinds.FloatDistribution(0.1, 1.0, log=True),
        "c": kinds.IntDistribution(1, 9),
        "d": kinds.IntDistribution(1, 7, step=3),
        "+e": kinds.CategoricalDistribution(["x", "y"]),
    }
    for wrong, text in (
        (["hydra/sweeper=nevergrad"], "the sweepers are optuna"),
        (["hydra.sweeper.n_trial=3"], "did you mean 'n_trials'"),
        (["hydra.run.dir=x"], "belongs to Hydra"),
    ):
        with pytest.raises(ConfigError, match=text):
            split_settings(wrong)
    with pytest.raises(ConfigError, match="no key has values to draw from"):
        read_space(["a=1"], [])


def test_names_and_globs(tmp_path):
    assert common_name(["a_b", "a_b"]) == "a_b"
    assert common_name(["tiny_pretrain", "tiny_dba_pretrain"]) == "tiny"
    assert common_name(["x", "y"]) == "sweep"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tinymine.yaml").write_text("# Mine.\n")
    assert ["model=tinymine"] in expand_sweep(["model=glob(tiny*)"], [tmp_path])


def test_a_value_that_was_also_given_for_all_points_is_told_of_its_point():
    given = ["model=tiny", "train.batch_size=4", "train.batch_size=2,4", "seed=1,2"]
    words = find_varied(expand_sweep(given))
    assert words == [[f"train.batch_size={size}", f"seed={seed}"] for size in (2, 4) for seed in (1, 2)]
