"""What the console shows while a phase trains: a bar, a plot of the loss, plain lines, or nothing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from caramba.console import logger

PLOT_ROWS = 14
LINE_EVERY_S = 60.0


class Display:
    """Shows rows of a phase. A bar and a plot need a terminal; elsewhere there are plain lines, some ten of a phase and
    one a minute.

    Args:
        mode: rich, plain, plot or none.
        work_after: what trains after this phase, as a multiple of its work.
    """

    def __init__(self, phase: str, steps: int, mode: str, *, work_after: float = 0.0) -> None:
        self.phase, self.steps, self.work_after = phase, steps, work_after
        self.mode = mode if logger.is_terminal or mode == "none" else "plain"
        self.held_out: float | None = None
        self._bar: Any = None
        self._task: Any = None
        self._live: Any = None
        self._losses: list[tuple[int, float]] = []
        self._opened_at = 0.0
        self._first = self._tenth = 0
        self._printed_at = 0.0

    def open(self, step: int) -> None:
        """Begin to show a phase after `step` steps."""
        self._opened_at = self._printed_at = time.monotonic()
        self._first, self._tenth = step, step * 10 // self.steps
        if self.mode == "rich":
            self._bar = logger.progress_bar()
            self._bar.__enter__()
            self._task = self._bar.add_task(self.phase, total=self.steps, completed=step, loss="", rate="")
        elif self.mode == "plot":
            self._live = logger.live()
            self._live.__enter__()

    def keep_held_out(self, loss: Any) -> None:
        """Show the held-out loss of a validation in the rows after it."""
        self.held_out = self.held_out if loss is None else float(loss)

    def show(self, step: int, row: Mapping[str, float]) -> None:
        """Show the row of a step: the mean loss of the last 50 steps, and its rates."""
        loss = row["running_loss"]
        if self._bar is not None:
            shown = f"mean loss {loss:.4f}"
            if self.held_out is not None:
                shown += f"  held-out {self.held_out:.4f}"
            rates = _rates(row) + [f"{name} {value}" for name, value in self._after(step).items()]
            self._bar.update(self._task, completed=step, loss=shown, rate="  ".join(rates))
        elif self._live is not None:
            self._losses.append((step, loss))
            self._live.update(self._plot("  ".join(_rates(row))), refresh=True)
        elif self.mode == "plain":
            now, tenth = time.monotonic(), step * 10 // self.steps
            if tenth > self._tenth or now - self._printed_at > LINE_EVERY_S:
                self._tenth, self._printed_at = tenth, now
                logger.training_step(self.phase, step, loss, {"steps": self.steps} | self._extras(step, row))

    def _extras(self, step: int, row: Mapping[str, float]) -> dict[str, Any]:
        """Return what a plain line has besides step and loss."""
        shown: dict[str, Any] = {} if self.held_out is None else {"held-out loss": f"{self.held_out:.4f}"}
        if "lr" in row:
            shown["lr"] = f"{row['lr']:.3g}"
        return shown | _shares(row) | self._times(step) | self._after(step)

    def _seconds_a_step(self, step: int) -> float | None:
        done = step - self._first
        return (time.monotonic() - self._opened_at) / done if done > 0 and self._opened_at else None

    def _times(self, step: int) -> dict[str, Any]:
        each = self._seconds_a_step(step)
        if each is None:
            return {}
        return {
            "time": _clock(time.monotonic() - self._opened_at),
            "left": _clock(each * (self.steps - step)),
        }

    def _after(self, step: int) -> dict[str, Any]:
        """Return the time that is left of all phases, where others train after this one."""
        each = self._seconds_a_step(step)
        if each is None or not self.work_after:
            return {}
        return {"all phases left": _clock(each * (self.steps - step + self.work_after * self.steps))}

    def close(self) -> None:
        """Stop updating; the last output stays."""
        for drawn in (self._bar, self._live):
            if drawn is not None:
                drawn.__exit__(None, None, None)
        self._bar = self._live = None

    def _plot(self, rates: str) -> Any:
        from rich.text import Text

        steps, losses = zip(*self._losses, strict=True)
        title = f"{self.phase}  step {steps[-1]:,}/{self.steps:,}  mean loss {losses[-1]:.4f}  {rates}"
        return Text(draw_curve(steps, losses, title, logger.width, PLOT_ROWS))


def draw_curve(steps: tuple[int, ...], values: tuple[float, ...], title: str, width: int, height: int) -> str:
    """Return a curve in braille characters, of `height` lines with its title and axes."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plotsize(width, height)
    plotext.title(title)
    plotext.plot(list(steps), list(values), marker="braille")
    return plotext.uncolorize(plotext.build()).rstrip("\n")


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _shares(row: Mapping[str, float]) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    if "tokens_per_s" in row:
        shown["tok/s"] = round(row["tokens_per_s"])
    if "mfu" in row:
        shown["MFU"] = f"{row['mfu']:.1%}"
    if row.get("data_wait_share", 0.0) >= 0.01:
        shown["data wait"] = f"{row['data_wait_share']:.0%}"
    return shown


def _rates(row: Mapping[str, float]) -> list[str]:
    return [f"{value:,} {name}" if name == "tok/s" else f"{name} {value}" for name, value in _shares(row).items()]
