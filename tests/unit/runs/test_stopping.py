"""Signals that ask a run to stop, the ranks of a SLURM step, and the job that has a run."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from caramba.errors import ConfigError, Preempted
from caramba.runs import exit_codes
from caramba.runs.exit_codes import (
    PREEMPTED,
    STOPPING,
    TERMINATED,
    run_command,
    status_of,
    stop_on_signals,
    stop_signal,
    until_recorded,
    until_step_ends,
)
from caramba.runs.ranks import adopt_slurm_ranks, is_rank
from caramba.runs.state import clock_skew, current_job, queue, record_job, refuse_queued


@pytest.fixture(autouse=True)
def default_hangup() -> Iterator[None]:
    """A process that nohup started ignores SIGHUP, and so do its children: these tests need the default."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def tell(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def _foreground():
    """A shell that runs the tests in the background ignores these two, and a run would too."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def error_of(number: signal.Signals) -> type[BaseException]:
    return KeyboardInterrupt if number == signal.SIGINT else Preempted


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_stops_at_once_or_when_a_step_has_ended(number):
    before = signal.getsignal(number)
    done = []

    def between_phases() -> None:
        with stop_on_signals():
            tell(number)
            done.append("went on")

    def in_a_step() -> None:
        with stop_on_signals():
            with until_step_ends():
                tell(number)
                assert stop_signal() == number
                tell(signal.SIGTERM)  # the first one counts
                done.append("step")
            done.append("went on")

    for work in (between_phases, in_a_step):
        with pytest.raises(error_of(number), match=number.name):
            work()
    assert done == ["step"]
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", STOPPING)
def test_until_recorded_signal_after_the_last_step_waits_for_the_record(number):
    """Trap: the last step saves no state, so a stop before the record lost the steps since the last saved one."""
    done = []

    def work() -> None:
        with stop_on_signals():
            with until_recorded():
                with until_step_ends():
                    tell(number)
                done.append("trained")
                tell(signal.SIGTERM)
                done.append("recorded")
            done.append("continued")

    with pytest.raises(error_of(number), match=number.name):
        work()
    assert done == ["trained", "recorded"]


def test_until_recorded_signal_before_training_stops_at_once():
    done = []

    def work() -> None:
        with stop_on_signals(), until_recorded():
            tell(signal.SIGTERM)
            done.append("planned")

    with pytest.raises(Preempted, match="SIGTERM"):
        work()
    assert done == []


def test_stop_on_signals_second_ctrl_c_in_a_step_stops_at_once(monkeypatch, capfd):
    done = []

    def work() -> None:
        with stop_on_signals(), until_step_ends():
            tell(signal.SIGINT)
            tell(signal.SIGINT)  # The same press, from the terminal and from a parent.
            done.append("same press")
            monkeypatch.setattr(exit_codes, "SAME_PRESS_S", 0.0)
            tell(signal.SIGINT)
            done.append("second press")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["same press"]
    assert "Ctrl-C again stops at once" in capfd.readouterr().err


def test_stop_on_signals_ignored_signal_stays_ignored():
    """A background job of a shell ignores Ctrl-C, and one under nohup the closed terminal."""
    for number in (signal.SIGINT, signal.SIGHUP):
        before = signal.signal(number, signal.SIG_IGN)
        try:
            with stop_on_signals(), until_step_ends():
                tell(number)
                assert stop_signal() == 0
            assert signal.getsignal(number) is signal.SIG_IGN
        finally:
            signal.signal(number, before)


IN_A_TERMINAL = """
import os, sys, time
from caramba.console import logger
from caramba.runs.exit_codes import stop_signal, stop_on_signals, until_step_ends
with stop_on_signals(), until_step_ends():
    logger.info("ready")
    while not stop_signal():
        time.sleep(0.01)
    for _ in range(20):
        logger.info("a line of the step")
        print("another", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").write("saved")
"""


def test_stop_on_signals_closed_terminal_lets_the_step_save(tmp_path):
    """Trap: SIGHUP killed the run, and writing to the closed terminal fails with EIO."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL, str(tmp_path / "state")])
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1024)
    os.close(terminal)
    os.waitpid(child, 0)
    assert (tmp_path / "state").read_text() == "saved"


BROKEN_PIPE = """
import sys
from caramba.console import logger
from caramba.errors import Preempted
from caramba.runs.exit_codes import stop_on_signals, until_step_ends
try:
    with stop_on_signals(), until_step_ends():
        for number in range(3):
            logger.info("a line that nobody reads")
        open(sys.argv[1], "w").write("saved")
except Preempted as stop:
    sys.exit(str(stop))
"""


def test_stop_on_signals_broken_pipe_lets_the_step_save(tmp_path):
    """Trap: `caramba launch | head` lost the steps since the last saved state."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_PIPE, str(tmp_path / "state")],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (tmp_path / "state").read_text() == "saved"
    assert (done.returncode, done.stderr) == (1, "SIGPIPE\n")


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_end_closed_streams_are_opened_on_the_null_device(tmp_path, redirect):
    """Trap: a run whose stdout was closed failed after its folder was made."""
    code = (
        "import sys; from caramba.console import logger; from caramba.runs.exit_codes import run_command\n"
        "def command():\n"
        "    logger.header('title'); logger.warning('text'); print('line')\n"
        f"    assert open({str(tmp_path / 'file')!r}, 'w').fileno() > 2\n"
        "    return 7\n"
        "sys.exit(run_command(command))"
    )
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(code)} {redirect}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/x"),
            "/runs/x: No space left on device; free space",
        ),
        (
            RuntimeError("I/O error: No space left on device (os error 28)"),
            "os error 28); free space on that disk",
        ),
        (RuntimeError("unable to write to file </torch_1_2>"), "shared memory is full (/dev/shm"),
    ],
)
def test_end_full_disk_is_named(capsys, error, text):
    def command() -> int:
        raise error

    assert run_command(command) == 1
    assert text in capsys.readouterr().err


def test_end_escape_characters_are_printed_as_text(capsys):
    """Trap: a message could move the cursor and retitle the terminal of its reader."""

    def command() -> int:
        raise ConfigError("no option '\x1b]0;title\x07\x1b[2J'")

    assert run_command(command) == 2
    assert capsys.readouterr().err == "error: no option '\\x1b]0;title\\x07\\x1b[2J'\n"


class Finalized:
    """What tells itself of a signal as it goes: Python drops whatever the handler raises there."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        tell(self.number)


@pytest.mark.parametrize(("number", "kind"), [(number, error_of(number)) for number in STOPPING])
def test_a_stop_that_python_drops_is_asked_for_again(number, kind):
    """Trap: it was printed as `Exception ignored in`, and the run was deaf to every signal after it."""
    hook = sys.unraisablehook
    went_on = []

    def work() -> None:
        with stop_on_signals():
            Finalized(number)
            went_on.append(number)
            time.sleep(60)

    with pytest.raises(kind):
        work()
    assert went_on == [number], "it had been dropped"
    assert sys.unraisablehook is hook


def test_other_errors_that_python_drops_are_told_as_ever(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_type))

    class Failing:
        def __del__(self) -> None:
            raise ValueError

    with stop_on_signals():
        Failing()
    assert told == [ValueError]


def test_the_signal_after_one_that_was_swallowed_stops_and_one_while_it_stops_does_not():
    cleaned = []

    def clean() -> None:
        tell(signal.SIGTERM)
        try:
            raise ValueError
        except ValueError:
            tell(signal.SIGTERM)
        cleaned.append(True)

    def work() -> None:
        with stop_on_signals():
            with contextlib.suppress(BaseException):  # as code does that takes anything for a failure of its own
                tell(signal.SIGUSR1)
            try:
                tell(signal.SIGTERM)
            finally:
                clean()

    with pytest.raises(Preempted, match="SIGUSR1"):
        work()
    assert cleaned


def test_a_rank_that_waits_for_another_leaves_it_to_that():
    with stop_on_signals(follows=True):
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "it hangs in C++, where no handler runs"
        tell(signal.SIGUSR2)
        with until_step_ends():
            tell(signal.SIGUSR1)
            assert stop_signal() == signal.SIGUSR1
    assert stop_signal() == 0, "the next training in this process would stop at its first step"


def test_a_stop_is_no_failure(capsys):
    def stopped(name):
        def command() -> int:
            raise Preempted(name)

        return run_command(command)

    assert (stopped("SIGUSR1"), stopped("SIGTERM")) == (PREEMPTED, TERMINATED) == (75, 143)
    assert "stopped by SIGUSR1" in capsys.readouterr().err
    assert not issubclass(Preempted, Exception), "code that handles errors must not take it"
    assert status_of(Preempted("SIGUSR2")) == 75


def test_tasks_of_our_own_step_are_ranks():
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"}
    variables = {**slurm, "SLURM_NODEID": "1", "SLURM_JOB_ID": "77"}
    adopt_slurm_ranks(variables)
    assert not is_rank(variables), "tasks of somebody else's step are left alone"
    assert current_job(variables) is None
    variables["CARAMBA_RANKS"] = "slurm"
    adopt_slurm_ranks(variables)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    assert [variables[name] for name in names] == ["5", "8", "1", "4", "1", "77"]
    assert current_job(variables) == "77"
    assert current_job({**variables, "SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "3"}) == "70_3"


AGENT_OF_A_RANK = """
import os, subprocess, sys
rank = "from caramba.runs.ranks import end_with_agent as e; e(); print('at work', flush=True); import time; time.sleep(60)"
# The signal may come while the rank is still in its own print, which a handler must not enter.
stubborn = "import os, signal; signal.signal(signal.SIGTERM, lambda *_: os.write(1, b'asked' + bytes([10]))); from caramba.runs import ranks; ranks.STOP_S = 0.1; "
given = {
    "ours": {"CARAMBA_AGENT": str(os.getpid())},
    "another": {"CARAMBA_AGENT": "1"},
    "torchrun": {"TORCHELASTIC_USE_AGENT_STORE": "True"},
}[sys.argv[1]]
code = stubborn + rank if "torchrun" in sys.argv else rank
subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **given}, start_new_session=True).wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a parent-death signal")
def test_ranks_end_with_their_agent_however_it_ends():
    """Trap: ranks in sessions of their own go on, with the GPUs and the lock, when the agent is killed.

    Ours kills its ranks. Another's, which hears no SIGUSR1, has them asked to stop, and killed when they do not.
    """
    command = [sys.executable, "-c", AGENT_OF_A_RANK]
    for whose, how, last_words in (
        ("ours", signal.SIGKILL, ""),
        ("torchrun", signal.SIGUSR1, "asked\n"),
    ):
        with subprocess.Popen([*command, whose], stdout=subprocess.PIPE, text=True) as agent:
            assert agent.stdout is not None
            assert agent.stdout.readline() == "at work\n"
            agent.send_signal(how)
            began = time.monotonic()
            said = agent.stdout.read()
            assert said == last_words, "the pipe ends with the last who holds it, which is the rank"
            assert time.monotonic() - began < 30
    late = subprocess.run([*command, "another"], capture_output=True, text=True, timeout=60)
    assert "the agent that started it, process 1, has ended; resume with caramba resume" in late.stderr
    assert late.stdout == ""


def test_a_run_that_a_job_has_is_refused(tmp_path, monkeypatch):
    """squeue is a script that prints a queue: what is tested is who is refused for what it says."""
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\nprintf '12|PENDING|Priority\\n13_4|RUNNING|None\\n14|CANCELLED|None\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    for name, number, text in (
        ("a", "12", r"SLURM job 12 PENDING \(Priority\) has this run.*scancel 12"),
        ("b", "13_4", r"SLURM job 13_4 RUNNING has this run"),
        ("c", "13", r"SLURM job 13_4 RUNNING has this sweep"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        record_job(folder, number)
        with pytest.raises(ConfigError, match=text):
            refuse_queued(folder, "sweep" if name == "c" else "run")
    record_job(tmp_path / "a", "14")
    refuse_queued(tmp_path / "a")
    assert [job.is_alive for job in queue().values()] == [True, True, False]
    monkeypatch.setenv("PATH", str(tmp_path / "a"))
    assert queue() == {}


def test_a_clock_that_is_behind_is_named(tmp_path):
    run = tmp_path
    (run / "manifest.json").write_text("{}")
    assert clock_skew(run) is None
    stat = (run / "manifest.json").stat()
    os.utime(run / "manifest.json", (stat.st_mtime + 600, stat.st_mtime + 600))
    text = clock_skew(run)
    assert text is not None
    assert "ahead of this machine's clock: the clocks differ" in text


ENDS = """
import atexit, os, sys
from caramba.runs.exit_codes import exit_process
class Last:
    def __del__(self):
        os.write(1, b"Python ended")
last = Last()
atexit.register(print, "registered", end=" ")
print("said", end=" ")
if "group" in sys.argv:
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
exit_process(7)
"""


@pytest.mark.parametrize("kind", ["alone", "rank", "group"])
def test_a_rank_ends_before_python_does(kind):
    """Its group's threads, if they are at work by then, abort the process now and then."""
    rank = {"RANK": "1", "WORLD_SIZE": "2"} if kind == "rank" else {}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS, kind], env={**os.environ, **rank}, capture_output=True, text=True
    )
    assert ended.returncode == 7, ended.stderr
    assert ended.stdout == "said registered " + ("Python ended" if kind == "alone" else "")
