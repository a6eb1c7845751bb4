"""Everything that a person reads while caramba works: rich on a terminal, plain lines everywhere else."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from caramba.errors import visible

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.progress import Progress


T = TypeVar("T")

# Logs and pipes have no width of their own.
PLAIN_WIDTH = 110
NARROW_COLUMNS = 100  # below which a progress bar is left out
WIDE_COLUMNS = 150  # below which it is short


def print_stderr(text: str) -> None:
    """Print a line to stderr, also under --quiet."""
    print(text, file=sys.stderr, flush=True)


class Console:
    """Prints messages to stdout, and warnings and errors to stderr.

    Text is printed as it is: brackets are no markup, control characters are escaped, and messages and paths
    are never wrapped, so that a log can be searched and a path copied. rich is imported at the first message.
    """

    def __init__(self) -> None:
        self._quiet = False
        self.is_debug = False  # under --debug: tracebacks, and checks that wait for the device
        self.on_lost: Callable[[], None] | None = None
        """Called once the reader of an output is gone, a closed pipe or terminal; without it that is an error."""
        self._consoles: dict[bool, tuple[TextIO, RichConsole]] = {}

    @property
    def quiet(self) -> bool:
        """Whether everything but warnings and errors is silenced."""
        return self._quiet

    @quiet.setter
    def quiet(self, value: bool) -> None:
        self._quiet = value

    @property
    def is_terminal(self) -> bool:
        """Whether stdout is a terminal that can show a progress bar."""
        return _is_terminal(sys.stdout)

    def header(self, title: str, subtitle: str | None = None) -> None:
        """Open a section: a blank line, the title and a rule below it."""
        self._line("")
        self._line((title, "bold cyan"), (f"  {subtitle}" if subtitle else "", "dim"))
        self._line(("-" * min(PLAIN_WIDTH, len(title) + (len(subtitle) + 2 if subtitle else 0)), "cyan"))

    def subheader(self, title: str) -> None:
        """Open a part of a section."""
        self._line("")
        self._line((title, "bold"))

    def info(self, text: str) -> None:
        """Print a message."""
        self._line(text)

    def success(self, text: str) -> None:
        """Print that something is done."""
        self._line(("done: ", "green"), text)

    def warning(self, text: str) -> None:
        """Print a warning to stderr, `quiet` or not."""
        self._line(("warning: ", "yellow"), text, stderr=True)

    def error(self, text: str) -> None:
        """Print an error to stderr, `quiet` or not."""
        self._line(("error: ", "bold red"), text, stderr=True)

    def metric(self, name: str, value: Any, unit: str = "") -> None:
        """Print one measured number."""
        self._line(f"  {name}: ", (number(value), "bold"), f" {unit}" if unit else "")

    def step(self, i: int, n: int, text: str) -> None:
        """Print which of `n` steps begins."""
        self._line((f"[{i}/{n}] ", "cyan"), text)

    def path(self, path: Any, label: str = "") -> None:
        """Print a path in one piece."""
        self._line(f"{label}: " if label else "", (str(path), "cyan"))

    def key_value(self, mapping: Mapping[str, Any]) -> None:
        """Print names and values in two aligned columns."""
        width = max((len(str(key)) for key in mapping), default=0)
        for key, value in mapping.items():
            # Seeds and identifiers are whole numbers too, and take no thousands marks.
            self._line((f"  {key!s:<{width}}  ", "dim"), number(value) if isinstance(value, float) else str(value))

    def training_step(self, phase: str, step: int, loss: float, extras: Mapping[str, Any] | None = None) -> None:
        """Print one step of training: the mean loss of the steps up to it, and whatever else was measured."""
        tail = "".join(f"  {name} {number(value)}" for name, value in (extras or {}).items())
        self._line((phase, "cyan"), f"  step {step:,}  mean loss {loss:.4f}{tail}")

    def benchmark_result(self, name: str, model: str, value: Any, unit: str = "") -> None:
        """Print what a benchmark measured on a model."""
        self._line(f"  {name}  {model}: ", (number(value), "bold"), f" {unit}" if unit else "")

    def artifacts_summary(self, mapping: Mapping[str, Any]) -> None:
        """Print what was written and where."""
        self.subheader("Artifacts")
        width = max((len(str(name)) for name in mapping), default=0)
        for name, path in mapping.items():
            self._line((f"  {name!s:<{width}}  ", "dim"), (str(path), "cyan"))

    def table(self, title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Print a table; cells that do not fit are folded, never cut."""
        if self._quiet:
            return
        from rich import box
        from rich.table import Table
        from rich.text import Text

        listed = [[number(cell) for cell in row] for row in rows]
        table = Table(title=Text(_clean(title, sys.stdout)), title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(columns):
            is_numeric = bool(listed) and all(_starts_as_number(row[index]) for row in listed)
            heading = Text(_clean(str(column), sys.stdout))
            table.add_column(heading, justify="right" if is_numeric else "left", overflow="fold")
        for row in listed:
            table.add_row(*(Text(_clean(cell, sys.stdout)) for cell in row))
        self._print(self._console(), table)

    def progress(self, iterable_or_total: Iterable[T] | int, description: str = "") -> Iterator[Any]:
        """Yield the items, or the numbers below a total, and show how far the loop is.

        A terminal shows a bar; elsewhere a line is printed every 10%.
        """
        items = range(iterable_or_total) if isinstance(iterable_or_total, int) else iterable_or_total
        total = len(items) if isinstance(items, Sized) else None
        if self._quiet or not self.is_terminal:
            return self._plain_progress(items, total, description)
        return self._drawn_progress(items, total, description)

    def progress_bar(self) -> Progress:
        """Return a rich Progress, a context manager that yields itself, for a training loop.

        Columns: description, bar, step m/n, loss, tokens/s, time left. A task shows the fields `loss` and
        `tokens_per_s` (numbers), or `loss` and `rate` (text), once it has them. Without a terminal it prints
        one line per task at its end; under `quiet`, nothing.
        """
        from rich.progress import Progress

        console = self._console()
        return Progress(
            *_columns(self.is_terminal, console.width),
            console=console,
            disable=self._quiet,
            auto_refresh=self.is_terminal,
        )

    def live(self) -> Live:
        """Return a rich Live, a context manager that yields itself, for a display that is refreshed repeatedly."""
        from rich.live import Live

        return Live(console=self._console(), auto_refresh=False)

    @property
    def width(self) -> int:
        """Columns that a line has."""
        return self._console().width

    def _plain_progress(self, items: Iterable[T], total: int | None, description: str) -> Iterator[T]:
        done, tenths = 0, 0
        for item in items:
            yield item
            done += 1
            if total and done * 10 // total > tenths:
                tenths = done * 10 // total
                self._line(f"{description}: {done}/{total}" if description else f"{done}/{total}")
        if total is None:
            self._line(f"{description}: {done}" if description else str(done))

    def _drawn_progress(self, items: Iterable[T], total: int | None, description: str) -> Iterator[T]:
        with self.progress_bar() as bar:
            task = bar.add_task(_clean(description, sys.stdout), total=total)
            for item in items:
                yield item
                bar.advance(task)

    def _line(self, *parts: str | tuple[str, str], stderr: bool = False) -> None:
        if self._quiet and not stderr:
            return
        from rich.text import Text

        console = self._console(stderr)
        line = Text()
        for part in parts:
            text, style = part if isinstance(part, tuple) else (part, "")
            line.append(_clean(text, console.file), style)
        self._print(console, line, soft_wrap=True)

    def _print(self, console: RichConsole, item: Any, *, soft_wrap: bool | None = None) -> None:
        try:
            console.print(item, soft_wrap=soft_wrap)
        except OSError as error:
            if self.on_lost is None or error.errno not in (errno.EPIPE, errno.EIO):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, console.file.fileno())
            os.close(nowhere)
            self.on_lost()

    def _console(self, stderr: bool = False) -> RichConsole:
        """Return the rich console of what stdout or stderr is now (a test or a notebook may replace it)."""
        stream = sys.stderr if stderr else sys.stdout
        # While a bar is shown, rich wraps the stream; the bar's own console has to print.
        stream = getattr(stream, "rich_proxied_file", stream)
        known = self._consoles.get(stderr)
        if known is None or known[0] is not stream:
            known = (stream, _open(stream))
            self._consoles[stderr] = known
        return known[1]


def number(value: Any) -> str:
    """Write a number for a person: whole numbers with thousands marks, others with four digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.4g}"
    return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.4g}"


def _open(stream: TextIO) -> RichConsole:
    from rich.console import Console as RichConsole

    class PlainErrors(RichConsole):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))  # In place of its SystemExit.

    is_terminal = _is_terminal(stream)
    return PlainErrors(
        file=stream,
        # Set outright: rich would take FORCE_COLOR as a wish for control codes in a pipe.
        force_terminal=is_terminal,
        force_jupyter=False,
        width=None if is_terminal else PLAIN_WIDTH,
        color_system="auto" if is_terminal else None,
        markup=False,
        highlight=False,
        emoji=False,
    )


def _is_terminal(stream: TextIO) -> bool:
    return not stream.closed and stream.isatty()


def _clean(text: str, stream: Any) -> str:
    """Escape control characters and what the stream's encoding lacks, so that every message prints as text."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return visible(text).encode(encoding, "backslashreplace").decode(encoding)


def _starts_as_number(cell: str) -> bool:
    return re.match(r"[-+]?[0-9]|-?$|nan|-?inf", cell) is not None


def _columns(is_terminal: bool, width: int) -> list[Any]:
    from rich import progress
    from rich.text import Text

    class FieldColumn(progress.ProgressColumn):
        """Shows what `text` makes of a task's fields, which may not be there yet."""

        def __init__(self, text: Any) -> None:
            self.text = text
            super().__init__()

        def render(self, task: progress.Task) -> Text:
            return Text(self.text(task.fields))

    name = progress.TextColumn("{task.description}", markup=False)
    counts = [progress.TextColumn("step"), progress.MofNCompleteColumn()]
    values = [FieldColumn(_loss_text), FieldColumn(_rate_text)]
    if not is_terminal:
        return [name, *counts, *values]
    left = [progress.TimeRemainingColumn(compact=True), progress.TextColumn("left")]
    if width < NARROW_COLUMNS:  # a row that does not fit would be cut
        return [name, *counts[1:], values[0], *left] if width >= NARROW_COLUMNS // 2 else [*counts[1:], *left]
    return [name, progress.BarColumn(bar_width=30 if width >= WIDE_COLUMNS else 10), *counts, *values, *left]


def _loss_text(fields: Mapping[str, Any]) -> str:
    loss = fields.get("loss", "")
    return f"loss {loss:.4f}" if isinstance(loss, int | float) else str(loss)


def _rate_text(fields: Mapping[str, Any]) -> str:
    rate = fields.get("tokens_per_s", fields.get("rate", ""))
    return f"{rate:,.0f} tokens/s" if isinstance(rate, int | float) else str(rate)


logger = Console()


def align_columns(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return rows of equal length as lines of left-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(indent + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
