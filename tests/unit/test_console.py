"""The console: plain lines without a terminal, one place that is silenced, nothing imported before it prints."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from caramba.console import Console, logger, number


@pytest.fixture
def console() -> Console:
    return Console()


def test_lines_are_plain_without_a_terminal(
    console: Console, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    console.header("Training", "tiny_dba")
    console.subheader("Blockwise")
    console.info("a message")
    console.success("saved")
    console.metric("perplexity", 12.3456, "nats")
    console.step(2, 5, "transplant")
    console.key_value({"seed": 1337, "device": "cpu"})
    console.training_step("global", 1200, 2.34567, {"tok/s": 15234})
    console.benchmark_result("latency", "student", 123.456, "tok/s")
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out == (
        "\nTraining  tiny_dba\n------------------\n\nBlockwise\na message\ndone: saved\n"
        "  perplexity: 12.35 nats\n[2/5] transplant\n  seed    1337\n  device  cpu\n"
        "global  step 1,200  mean loss 2.3457  tok/s 15,234\n  latency  student: 123.5 tok/s\n"
    )


def test_warnings_and_errors_go_to_stderr_even_when_quiet(console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    console.quiet = True
    assert console.quiet
    console.header("h")
    console.info("i")
    console.path("/a", "run")
    console.table("t", ["a"], [[1]])
    console.artifacts_summary({"a": "b"})
    assert list(console.progress(3, "loop")) == [0, 1, 2]
    with console.progress_bar() as bar:
        bar.add_task("phase", total=2, completed=2)
    console.warning("slow disk")
    console.error("model.d_model: got 5")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "warning: slow disk\nerror: model.d_model: got 5\n"
    console.quiet = False
    console.info("heard again")
    assert capsys.readouterr().out == "heard again\n"


def test_info_markup_and_control_characters_are_printed_as_text(
    console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    console.info("layers[0] [bold]x[/bold] :smile: \x1b[31mred\x1b[0m \x07")
    console.table("[t]", ["[red]c"], [["[/]"]])
    out = capsys.readouterr().out
    assert "layers[0] [bold]x[/bold] :smile: \\x1b[31mred\\x1b[0m \\x07\n" in out
    assert "[red]c" in out
    assert "[/]" in out


def test_long_paths_and_messages_are_not_wrapped(console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    path = "/runs/" + "very-long-name/" * 20 + "report.json"
    console.path(path, "report")
    console.artifacts_summary({"report.json": path})
    console.error(f"cannot read {path}")
    captured = capsys.readouterr()
    assert f"report: {path}\n" in captured.out
    assert f"  report.json  {path}\n" in captured.out
    assert captured.err == f"error: cannot read {path}\n"


def test_a_table_fits_the_plain_width_and_cuts_nothing(console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    console.table("Models", ["model", "perplexity", "note"], [["teacher", 12.3456, "w" * 150], ["student", 13.0, None]])
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 110
    assert out.count("w") == 150
    assert "12.35" in out
    assert "None" in out


def test_an_encoding_without_the_characters_does_not_fail(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    console.info("café")
    console.table("t", ["é"], [["x"]])
    sys.stdout.flush()
    assert raw.getvalue().startswith(b"caf\\xe9\n")


def test_progress_prints_tenths_and_yields_everything(console: Console, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(console.progress(40, "tokenise")) == list(range(40))
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"tokenise: {count}/40" for count in range(4, 41, 4)]
    assert list(console.progress((letter for letter in "abc"), "files")) == ["a", "b", "c"]
    assert capsys.readouterr().out == "files: 3\n"


def test_progress_bar_without_a_terminal_prints_one_plain_line(
    console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress_bar() as bar:
        task = bar.add_task("blockwise", total=20)
        for _ in range(20):
            bar.update(task, advance=1, loss=2.5, tokens_per_s=12345.6)
    out = capsys.readouterr().out
    assert re.sub(" +", " ", out).strip() == "blockwise step 20/20 loss 2.5000 12,346 tokens/s"
    assert "\x1b" not in out


def test_progress_bar_shows_text_fields_and_waits_for_missing_ones(
    console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    with console.progress_bar() as bar:
        bar.add_task("first", total=2, completed=1)
        bar.add_task("second", total=2, completed=1, loss="loss 1.5", rate="9 tok/s")
    first, second = capsys.readouterr().out.strip().splitlines()
    assert first.split() == ["first", "step", "1/2"]
    assert second.split() == ["second", "step", "1/2", "loss", "1.5", "9", "tok/s"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1234567, "1,234,567"),
        (0.0, "0"),
        (0.000012345, "1.234e-05"),
        (3.14159, "3.142"),
        (12345.678, "12,345.7"),
        (True, "True"),
        ("x", "x"),
    ],
)
def test_numbers_are_readable(value: object, text: str) -> None:
    assert number(value) == text


def test_a_terminal_gets_colour_and_a_bar() -> None:
    """A real pseudo-terminal: colour, a drawn bar, and messages printed above it."""
    code = (
        "from caramba.console import logger\n"
        "logger.info('plain'); logger.success('ok'); assert logger.is_terminal\n"
        "with logger.progress_bar() as bar:\n"
        "    task = bar.add_task('phase', total=3, loss='', rate='')\n"
        "    for i in range(3): bar.update(task, advance=1, loss=1.0); logger.info(f'above {i}')\n"
    )
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    env.pop("NO_COLOR", None)
    subprocess.run([sys.executable, "-c", code], stdout=follower, stderr=follower, env=env, check=True, timeout=60)
    os.close(follower)
    out = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux reports a closed terminal as an input/output error
            break
        if not chunk:
            break
        out += chunk
    os.close(leader)
    text = out.decode()
    assert "\x1b[32mdone: \x1b[0mok" in text
    assert "above 2" in text
    assert "loss 1.0000" in text


def test_importing_the_console_loads_no_rich_and_is_quick(tmp_path: Path) -> None:
    code = (
        "import sys, re, typing, collections.abc, caramba, time\n"
        "start = time.process_time(); import caramba.console; took = time.process_time() - start\n"
        "assert not [name for name in sys.modules if name.split('.')[0] in ('rich', 'torch')]\n"
        "print(took)\n"
    )
    # The first run compiles and keeps the bytecode, as an installation does; the others are what a user waits for.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    env["PYTHONPYCACHEPREFIX"] = str(tmp_path)
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=env) for _ in range(4)]
    assert min(float(run.stdout) for run in runs[1:]) < 0.005


def test_logger_is_the_shared_console() -> None:
    assert isinstance(logger, Console)
