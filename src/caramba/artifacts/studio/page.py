"""studio.html: the data of all runs, the script that shows them, and the libraries that draw, in one file."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from caramba.artifacts.across_runs.gather import RunRow, is_seed, swept_keys
from caramba.artifacts.across_runs.summary import HEADLINES, prefers_higher
from caramba.artifacts.studio.record import IndexedRun, index_runs, read_state
from caramba.errors import ConfigError
from caramba.runs.annotations import Annotations, read_annotations
from caramba.runs.files import is_locked
from caramba.runs.minting import runs_below
from caramba.runs.state import FAILED, FINISHED, RunState
from caramba.runs.sweeps import list_sweeps, read_sweep

MOST_FINE = 1500
"""Curves with all their points on one page; 1,000 runs have more, and each has fewer points."""
MOST_CELLS = 400_000
MOST_NOTE = 2000
_HERE = Path(__file__).parent
_VENDOR = _HERE / "vendor"


@dataclass(frozen=True)
class Found:
    """The runs of a folder, and what could not be read of its sweeps."""

    folder: Path
    runs: list[Path]
    sweeps: list[dict[str, Any]]
    sweep_of: dict[Path, str]
    problems: list[str]


def find(folder: Path) -> Found:
    """Return all runs and sweeps below a folder: `runs`, `runs/NAME`, one run, or any folder of runs."""
    root = folder.absolute()
    runs = runs_below(root)
    sweeps: list[dict[str, Any]] = []
    sweep_of: dict[Path, str] = {}
    problems: list[str] = []
    for place in list_sweeps(root):
        try:
            sweep = read_sweep(place)
        except ConfigError as error:
            problems.append(str(error))
            continue
        title = f"{place.parents[1].name}/{place.name}"
        linked = {run for point in sweep.points if (run := sweep.run_of(point)) is not None}
        sweep_of |= dict.fromkeys(linked, title)
        if (root / "index.json").is_file() and root == place:
            runs = sorted(linked)
        sweeps.append({"name": title, "points": len(sweep.points), "overrides": sweep.overrides})
    return Found(root, runs, sweeps, sweep_of, problems)


def build_data(
    found: Found, report: Callable[[int, int], None] | None = None, out: Path | None = None
) -> dict[str, Any]:
    """Return everything that the page shows, as plain JSON; links are relative to the folder `out`."""
    indexed = index_runs(found.folder, found.runs, most_fine=MOST_FINE, report=report)
    states = [_state_of(item) for item in indexed]
    words = [RunRow(item.run, "", item.record.words) for item in indexed]
    swept = swept_keys(words)
    metrics = list(dict.fromkeys(key for item in indexed for key in item.record.metrics))
    units = {key: value[1] for item in indexed for key, value in item.record.metrics.items()}
    place = {key: index for index, key in enumerate(metrics)}
    curve_names = list(dict.fromkeys((phase, key) for item in indexed for phase, key, _ in item.curves))
    curve_place = {name: index for index, name in enumerate(curve_names)}
    keys, values, cells, n_left_out = _differing([item.record.config for item in indexed])
    runs: list[dict[str, Any]] = []
    for index, (item, state) in enumerate(zip(indexed, states, strict=True)):
        record, notes = item.record, read_annotations(item.run)
        runs.append(
            {
                "name": record.name,
                "path": str(item.run),
                "link": _link(item.run, out or found.folder),
                "state": state.state,
                "phase": state.phase,
                "step": state.step,
                "steps": state.steps,
                "started": state.started,
                "updated": state.updated,
                "seconds": record.seconds,
                "error": (state.error or "")[:MOST_NOTE],
                "sweep": found.sweep_of.get(item.run, ""),
                "words": [[swept.index(key), value] for key, value in record.words.items() if key in swept],
                "metrics": [
                    [place[key], value, spread, int(is_error), n]
                    for key, (value, _, spread, is_error, n) in record.metrics.items()
                ],
                "config": cells[index],
                "phases": record.phases,
                "last": record.last,
                "curves": [[curve_place[phase, key], n] for phase, key, n in item.curves],
                "packed": base64.b64encode(item.packed).decode(),
                "sha": record.manifest_sha256,
                "git": record.git,
                "proxy": record.proxy,
                "tags": notes.tags,
                "note": notes.note if len(notes.note) <= MOST_NOTE else _cut(notes),
                "problems": [*record.problems, *notes.problems],
            }
        )
    return {
        "title": found.folder.name,
        "folder": str(found.folder),
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "sweeps": found.sweeps,
        "problems": found.problems,
        "swept": swept,
        "seeds": [is_seed(key) for key in swept],
        "metrics": [[key, units[key], int(prefers_higher(key))] for key in metrics],
        "headline": [place[key] for key in HEADLINES if key in place],
        "curves": [list(name) for name in curve_names],
        "keys": keys,
        "values": values,
        "left_out": n_left_out,
        "runs": runs,
    }


def build_page(data: dict[str, Any], *, is_live: bool = False) -> str:
    """Return the page. Its policy loads nothing; a live page may ask its own server for new data."""
    style = (_VENDOR / "uPlot.min.css").read_text(encoding="utf-8") + (_HERE / "studio.css").read_text(encoding="utf-8")
    scripts = {
        "uplot": (_VENDOR / "uPlot.iife.min.js").read_text(encoding="utf-8"),
        "studio": "\n".join((_HERE / name).read_text(encoding="utf-8") for name in SCRIPTS),
    }
    # Read by the browser as text, and run when a tab first needs them.
    later = {name: (_VENDOR / f"{name}.min.js").read_text(encoding="utf-8") for name in ("d3", "plot.umd")}
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in [*scripts.values(), *later.values()])
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {hashes}; base-uri 'none'; "
        f"form-action 'none'; connect-src {chr(39) + 'self' + chr(39) if is_live else chr(39) + 'none' + chr(39)}"
    )
    # Inside a script element `<` would end it, or begin a comment; U+2028 is no line end of HTML.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    body = (_HERE / "studio.html").read_text(encoding="utf-8")
    parts = [
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(data['title'])}: studio</title>\n<style>{style}</style>\n</head>",
        f'<body data-live="{int(is_live)}">\n{body}',
        f'<script type="application/json" id="data">{text}</script>',
        f"<script>{scripts['uplot']}</script>",
        *(f'<script type="text/plain" id="{name}">{text}</script>' for name, text in later.items()),
        f"<script>{scripts['studio']}</script>\n</body>\n</html>\n",
    ]
    return "\n".join(parts).encode("utf-8", "replace").decode()


SCRIPTS = ("model.js", "table.js", "lines.js", "facets.js", "main.js")


def _state_of(item: IndexedRun) -> RunState:
    """Return the state of a run: that of the record where it has ended and no worker has it."""
    plain: dict[str, Any] = item.record.state | {"run": item.run}
    known = RunState(**plain)
    is_ended = known.state in (FINISHED, FAILED) and not is_locked(item.run)
    return known if is_ended else read_state(item.run)


def _differing(configs: Sequence[str]) -> tuple[list[str], list[str], list[list[int]], int]:
    """Return the keys in which manifests differ, the values by number, and key and value of each run.

    Keys beyond MOST_CELLS cells are left out and counted. A manifest that cannot be read has no text.
    """
    lines = [frozenset(text.split("\n")) if text else frozenset[str]() for text in configs]
    readable = [found for found in lines if found]
    if len(readable) < 2:
        return [], [], [[] for _ in lines], 0
    shared = frozenset[str].intersection(*readable)
    own = [dict(_split(line) for line in found - shared) for found in lines]
    keys = sorted({key for found in own for key in found})
    kept = keys[: max(1, MOST_CELLS // len(lines))]
    place = {key: index for index, key in enumerate(kept)}
    values: dict[str, int] = {}
    cells: list[list[int]] = []
    for found in own:
        row: list[int] = []
        for key, value in found.items():
            if key in place:
                row += [place[key], values.setdefault(value, len(values))]
        cells.append(row)
    return kept, list(values), cells, len(keys) - len(kept)


def _split(line: str) -> tuple[str, str]:
    key, _, value = line.partition("\t")
    return key, value


def _link(run: Path, base: Path) -> str:
    """Return the address of a run's report from the page, or nothing where it has none."""
    file = run / "artifacts" / "report.html"
    return quote(os.path.relpath(os.fsencode(file), os.fsencode(base))) if file.is_file() else ""


def _cut(notes: Annotations) -> str:
    return f"{notes.note[:MOST_NOTE]}\u2026 ({len(notes.note):,} characters in all)"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
