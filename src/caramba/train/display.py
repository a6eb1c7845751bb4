"""What the console shows while a phase trains: a bar, a plot of the loss, plain lines, or nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from caramba.console import logger

PLOT_ROWS = 14


class Display:
    """Shows rows of a phase. A bar and a plot need a terminal; elsewhere there are plain lines, some ten of a phase.

    Args:
        mode: rich, plain, plot or none.
        shown: whether this process is the one that prints.
    """

    def __init__(self, phase: str, steps: int, mode: str, *, shown: bool = True) -> None:
        self.phase, self.steps = phase, steps
        is_drawn = logger.is_terminal and not logger.quiet
        self.mode = "none" if not shown else mode if is_drawn or mode == "none" else "plain"
        self._bar: Any = None
        self._task: Any = None
        self._live: Any = None
        self._losses: list[tuple[int, float]] = []

    def open(self, step: int) -> None:
        """Begin to show a phase after `step` steps."""
        if self.mode == "rich":
            self._bar = logger.progress_bar()
            self._bar.__enter__()
            self._task = self._bar.add_task(self.phase, total=self.steps, completed=step, loss="", rate="")
        elif self.mode == "plot":
            self._live = logger.live()
            self._live.__enter__()

    def show(self, step: int, row: Mapping[str, float]) -> None:
        """Show the row of a step: the mean loss of the last 50 steps, and its rates."""
        loss = row["running_loss"]
        if self._bar is not None:
            self._bar.update(
                self._task, completed=step, loss=f"mean loss {loss:.4f}", rate="  ".join(_rates(row))
            )
        elif self._live is not None:
            self._losses.append((step, loss))
            self._live.update(self._plot("  ".join(_rates(row))), refresh=True)
        elif self.mode == "plain" and (step == self.steps or step % max(10, self.steps // 10) < 10):
            logger.training_step(self.phase, step, loss, {"steps": self.steps, **_shares(row)})

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
    return [
        f"{value:,} {name}" if name == "tok/s" else f"{name} {value}" for name, value in _shares(row).items()
    ]
