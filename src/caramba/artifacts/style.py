"""How every figure looks, and how it becomes bytes: the same numbers give the same file."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

DPI = 150

# Okabe and Ito's palette: distinct under the common kinds of colour blindness.
COLOURS = {
    "teacher": "#0072B2",
    "teacher_continued": "#56B4E9",
    "student_transplant": "#F0E442",
    "student_blockwise": "#E69F00",
    "student_global": "#D55E00",
    "student": "#D55E00",
}
OTHER_COLOUR = "#009E73"
NAMES = {
    "teacher": "Teacher",
    "teacher_continued": "Teacher, continued",
    "student_transplant": "Student, transplant",
    "student_blockwise": "Student, blockwise",
    "student_global": "Student, global",
    "student": "Student",
    "copy": "Fewer KV heads",
    "copy_distilled": "Fewer KV heads, distilled",
    "weight_svd": "Weight SVD",
    "weight_svd_distilled": "Weight SVD, distilled",
    "random": "Random",
    "random_distilled": "Random, distilled",
}
INK, FAINT = "#222222", "#DDDDDD"

_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so every machine draws the same letters
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titlepad": 10,
    "axes.labelsize": 11,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 2.0,
    "lines.markersize": 7,
    "text.color": INK,
    "svg.hashsalt": "caramba",  # the same names of clip paths each time
    "savefig.facecolor": "white",
    "figure.facecolor": "white",
}


@contextlib.contextmanager
def styled() -> Generator[None, None, None]:
    """Draw with our settings alone, whatever a user's matplotlibrc sets."""
    import matplotlib

    mpl: Any = matplotlib
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        yield


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of that size in inches, bound to no window and no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    # Pads in inches; wspace as a share of a panel's width.
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08, wspace=0.05)
    figure = Figure(figsize=(width, height), dpi=DPI, layout=layout)
    FigureCanvasAgg(figure)
    return figure


@dataclass(frozen=True)
class Picture:
    """A figure as PNG, as SVG with texts as outlines, and as PDF, without time stamps."""

    png: bytes
    svg: bytes
    pdf: bytes

    def files(self, name: str) -> dict[str, bytes]:
        """Return the contents by file name; `name` ends with .png."""
        stem = name.removesuffix(".png")
        return {name: self.png, f"{stem}.svg": self.svg, f"{stem}.pdf": self.pdf}


def to_picture(figure: Any, labels: dict[str, str]) -> Picture:
    """Return the figure in every format, with a note when the teacher is a proxy."""
    png = to_png(figure, labels)  # adds the note
    figure.set_layout_engine(None)  # places stay: to lay out takes as long as to draw
    svg = _saved(figure, "svg", {"Date": None, "Creator": None})
    return Picture(png, svg, _saved(figure, "pdf", {"CreationDate": None, "Creator": None, "Producer": None}))


def to_png(figure: Any, labels: dict[str, str]) -> bytes:
    """Return the figure as a PNG without time stamp or version, with a note when the teacher is a proxy."""
    if "proxy" in labels:
        characters = int(figure.get_size_inches()[0] * 10)
        note = textwrap.fill(f"Proxy teacher: {labels['proxy']}", characters).replace("$", r"\$")
        figure.supxlabel(note, fontsize=10, color="#666666", style="italic", x=0.01, ha="left")
    return _saved(figure, "png", {"Software": None})


def _saved(figure: Any, form: str, metadata: dict[str, None]) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=DPI, metadata=metadata)
    return out.getvalue()


def colour_of(model: str) -> str:
    """Return the colour of a model row."""
    return COLOURS.get(model, OTHER_COLOUR)


def name_of(model: str) -> str:
    """Return a model row's name for people."""
    who, _, stage = model.partition("_")
    named = f"{NAMES[who]}, {stage}" if stage and who in NAMES else model
    return NAMES.get(model, named.replace("_", " "))


def log2_axis(axes: Any, values: list[int]) -> None:
    """Put a tick at each measured length, on a scale of doublings; leave out labels that would overlap."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    shown: list[int] = []
    span = max(values) / min(values)
    for value in sorted(values):
        # Neighbours closer than a twelfth of the axis would touch.
        if not shown or value / shown[-1] >= span ** (1 / 12):
            shown.append(value)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    label_ticks(axes.xaxis, whole_number)
    if len(set(values)) == 1:
        axes.set_xlim(values[0] / 2, values[0] * 2)


def label_ticks(axis: Any, text: Callable[[float], str]) -> None:
    """Label the ticks of an axis with what `text` makes of their values."""
    from matplotlib.ticker import FuncFormatter

    def label(value: float, _: int | None = None) -> str:
        return text(value)

    axis.set_major_formatter(FuncFormatter(label))


def log10_axis(axes: Any) -> None:
    """Make y logarithmic with ticks at 1, 2 and 5, enough of them within a decade or two."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())


def whole_number(value: float) -> str:
    """Return a whole number with thousands marks."""
    return f"{round(value):,}"


def short_number(value: float) -> str:
    """Return at most four significant digits, with thousands marks."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}" if value >= 100 else f"{value:.3g}"


def byte_text(value: float) -> str:
    """Return bytes with a binary unit: 1.5 MiB."""
    size = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.4g} B"
        size /= 1024
    return f"{size:,.3g} TiB"
