"""report.html: a whole run on one page that opens from disk, every number linked to its key, spread and source."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from caramba.artifacts.controls import CONTROLS_FILE
from caramba.artifacts.header import Fact, conclude
from caramba.artifacts.ladder import LADDER_FILE, TRAINING_LADDER_FILE
from caramba.artifacts.optimizers import OPTIMIZERS_FILE
from caramba.artifacts.recall import FAR_BACK_FILE, POSITION_FILE, RECALL_FILE
from caramba.artifacts.report import Omission
from caramba.artifacts.style import Picture
from caramba.artifacts.summary import LATENCY_FILE, MEMORY_FILE, SUMMARY_FILE
from caramba.artifacts.tables import NOTHING, Cell, Table, number_cell
from caramba.artifacts.training_curves import TRAINING_FILE
from caramba.artifacts.transplant import TRANSPLANT_FILE
from caramba.result import Artifact, Metric, RunResult, to_plain

_CSS = """
:root { color-scheme: light dark; --ink: #222; --faint: #555; --line: #ccc; --back: #fff; --head: #f3f3f3;
  --link: #005a94; --bad: #a31515; --good: #14672f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --faint: #aaa; --line: #444; --back: #16181b;
  --head: #23262b; --link: #7cc0f5; --bad: #ff9a8d; --good: #7fd79a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem 1.25rem 4rem; max-width: 72rem; color: var(--ink); background: var(--back);
  font: 1rem/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { margin: 0.5rem 0 0; font-size: 1.75rem; overflow-wrap: anywhere; }
h2 { margin: 2.5rem 0 0.5rem; padding-top: 0.75rem; border-top: 1px solid var(--line); font-size: 1.25rem; }
a { color: var(--link); }
a:focus-visible, [tabindex]:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; padding: 0; list-style: none; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { position: sticky; left: 0; max-width: calc(100vw - 2.5rem); padding: 0 0 0.4rem; color: var(--faint);
  text-align: left; }
th, td { padding: 0.3rem 0.75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap;
  font-weight: normal; }
thead th { background: var(--head); font-weight: 600; }
.word { max-width: 42rem; text-align: left; white-space: normal; overflow-wrap: break-word; }
td a { color: inherit; text-decoration-color: var(--line); }
tr:target { background: var(--head); outline: 2px solid var(--link); }
code, pre { font: 0.9em ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere; }
th code { white-space: nowrap; }
pre { padding: 0.75rem; background: var(--head); white-space: pre-wrap; }
figure { margin: 1rem 0; }
figure img { display: block; max-width: none; height: auto; background: #fff; }
figure .scroll { margin: 0; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 0.15rem 1rem; margin: 0.75rem 0; }
.facts dt { color: var(--faint); } .facts dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
.lead { font-size: 1.15rem; } .lead a { color: inherit; }
@media (prefers-color-scheme: dark) { figure img { filter: invert(0.92) hue-rotate(180deg); } }
figcaption, .note { color: var(--faint); }
.failed { color: var(--bad); font-weight: 700; }
.passed { color: var(--good); font-weight: 700; }
summary { cursor: pointer; padding: 0.25rem 0; font-weight: 600; }
.skip { position: absolute; left: -100vw; }
.skip:focus { position: static; }
@media print { .skip, nav { display: none; } body { max-width: none; font-size: 0.7rem; }
  :root { color-scheme: light; --ink: #222; --faint: #555; --line: #ccc; --back: #fff; --head: #f3f3f3; --link: #005a94;
    --bad: #a31515; --good: #14672f; }
  figure img { max-width: 100%; filter: none; }
  .scroll { overflow: visible; } th, td { padding: 0.15rem 0.4rem; }
  td.word:last-child { min-width: 11rem; overflow-wrap: anywhere; } th code { font-size: 0.85em; }
  tr, figure { break-inside: avoid; } h2, h3, caption { break-after: avoid; } }
"""


def document(title: str, body: str) -> str:
    """Return a whole page; its policy lets a browser load nothing but the images inside it and its own style."""
    digest = base64.b64encode(hashlib.sha256(_CSS.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_CSS}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def section(label: str, title: str, *parts: str) -> str:
    """Return a section under a heading that the contents link to."""
    inner = "\n".join(part for part in parts if part)
    return f'<section aria-labelledby="{label}">\n<h2 id="{label}">{escape(title)}</h2>\n{inner}\n</section>'


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    known: frozenset[str] = frozenset(),
    row_ids: Sequence[str] = (),
) -> str:
    """Return a table in a frame that scrolls sideways; a row's first cell is its heading, numbers align right.

    A number carries its key, and is a link where the key is in `known`: `metric_id` of it is then the target's id.
    """
    classes = ["" if any(row[place].is_number for row in rows) else ' class="word"' for place in range(len(head))]
    heads = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(head, classes, strict=True))
    lines: list[str] = []
    for index, row in enumerate(rows):
        kinds = ['th scope="row"', *["td"] * (len(row) - 1)]
        parts = [_cell(*part, known) for part in zip(row, kinds, classes, strict=True)]
        target = f' id="{escape(row_ids[index])}"' if row_ids else ""
        lines.append(f"<tr{target}>{''.join(parts)}</tr>")
    return (
        f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">\n<table>\n'
        f"<caption>{escape(caption)}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody>\n</table>\n</div>"
    )


def figure(picture: Picture | None, alt: str, caption: str, name: str) -> str:
    """Return an SVG inside the page with links to its other formats, or nothing where there is none.

    It keeps its own width and scrolls sideways on a narrow screen: smaller, its texts could not be read.
    """
    if picture is None:
        return ""
    data = base64.b64encode(picture.svg).decode()
    links = ", ".join(f'<a href="{quote(file)}">{file.rpartition(".")[2].upper()}</a>' for file in picture.files(name))
    return (
        f'<figure><div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">'
        f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}"></div>'
        f"<figcaption>{escape(caption)} ({links})</figcaption></figure>"
    )


def facts(pairs: Sequence[tuple[str, str]]) -> str:
    """Return a list of names with their texts."""
    inner = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f'<dl class="facts">{inner}</dl>' if pairs else ""


def sentence(pieces: Sequence[Cell], known: frozenset[str], kind: str) -> str:
    """Return a paragraph of pieces; a number whose key is in `known` links to its row."""
    texts = [
        f'<a href="#{quote(metric_id(piece.key))}" title="{escape(piece.key)}">{escape(piece.text)}</a>'
        if piece.key is not None and piece.key in known
        else escape(piece.text)
        for piece in pieces
    ]
    return f'<p class="{kind}">{"".join(texts)}</p>'


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph of plain text."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def details(title: str, text: str) -> str:
    """Return a long text that a click on its title shows."""
    return f"<details>\n<summary>{escape(title)}</summary>\n<pre>{escape(text)}</pre>\n</details>"


def file_link(name: str) -> str:
    """Return a link to a file in the page's folder."""
    return f'<a href="{quote(name)}">{escape(name)}</a>'


def metric_id(key: str) -> str:
    """Return the id of the row that holds a metric."""
    return f"metric:{key}"


def _cell(cell: Cell, opening: str, kind: str, known: frozenset[str]) -> str:
    text = escape(cell.text)
    if cell.is_code:
        text = f"<code>{text}</code>"
    if cell.text in ("passed", "failed") and not cell.is_code:
        text = f'<span class="{cell.text}">{text}</span>'
    elif cell.is_bold:
        text = f"<strong>{text}</strong>"
    target = (cell.key or "").removesuffix("#bound")
    if target in known:
        text = f'<a href="#{quote(metric_id(target))}">{text}</a>'
    key = f' data-key="{escape(cell.key)}"' if cell.key is not None else ""
    return f"<{opening}{kind}{key}>{text}</{opening[:2]}>"


# Sections that tables and figures make up, with the labels of their tables.
_SECTIONS = (
    ("Summary", ("comparison", "stages")),
    ("Training", ()),
    ("Controls", ("controls",)),
    ("Weights in 8 and 4 bits", ("weights",)),
    ("Inference ladder", ("ladder",)),
    ("Training ladder", ("training_ladder",)),
    ("Optimisers", ("optimizers",)),
    ("From scratch", ("variants",)),
    ("Verification", ("verification", "cases")),
    ("Long-term memory", ("recall", "contexts", "depths")),
    ("Accuracy", ("accuracy",)),
    ("Generated text", ("generation",)),
    ("Time and memory", ("throughput",)),
    ("Transplant", ("transplant",)),
)
_LOSSES = "Training and held-out loss, learning rate and throughput; dashed lines are phase borders"
_ROWS = "Training throughput and peak memory by row, with the change of held-out loss"
_BYTES = "Bytes of the cache against sequence length, with the bytes of the weights"
_LAYERS = "Error and energy kept by attention layer, above what each layer caches"
# Figures with their section and caption.
_FIGURES = (
    (SUMMARY_FILE, "Summary", "Perplexity by stage, throughput and cache, as bars"),
    (TRAINING_FILE, "Training", _LOSSES),
    (CONTROLS_FILE, "Controls", "Perplexity ratio against KV ratio, a point per control"),
    (LADDER_FILE, "Inference ladder", "Decode throughput by rung, with the speed-up over the first"),
    (TRAINING_LADDER_FILE, "Training ladder", _ROWS),
    (OPTIMIZERS_FILE, "Optimisers", "Training loss by tokens and by time; triangles are switches"),
    (POSITION_FILE, "Verification", "Perplexity ratio by position in the window"),
    (RECALL_FILE, "Long-term memory", "Recall by pairs, by bytes of the cache and by length of the context"),
    (FAR_BACK_FILE, "Long-term memory", "Keys found in held-out text by depth, and perplexity by position"),
    (LATENCY_FILE, "Time and memory", "Decode throughput and prefill time against prompt length"),
    (MEMORY_FILE, "Time and memory", _BYTES),
    (TRANSPLANT_FILE, "Transplant", _LAYERS),
)
_ALT = "{caption}. Its numbers are in the tables of this page and in the CSV files next to it."
_PHASE_HEAD = (
    *("Stage", "Phase", "Trains", "Steps", "Tokens", "Seconds", "Loss", "Held-out loss"),
    "Weights or why skipped",
)
_METRIC_HEAD = ("Metric", "Value", "Unit", "Std or standard error", "n", "Source")


def build_page(
    result: RunResult,
    metrics: dict[str, Metric],
    tables: Sequence[Table],
    pictures: Mapping[str, Picture | None],
    artifacts: Sequence[Artifact],
    omitted: Sequence[Omission],
    header: Sequence[Fact] = (),
) -> str:
    """Return the page; `pictures` holds the figures by file name and `artifacts` the files next to it."""
    known = frozenset(metrics)
    found = {item.label: item for item in tables}
    parts: list[tuple[str, list[str]]] = []
    for title, labels in _SECTIONS:
        shown = [_written(found[label], known) for label in labels if label in found]
        shown += [
            figure(pictures.get(name), _ALT.format(caption=caption), caption, name)
            for name, place, caption in _FIGURES
            if place == title
        ]
        parts.append((title, shown))
    parts += [
        ("Phases", _phases(result)),
        ("Failures", _failures(result)),
        ("Left out", _omitted(omitted)),
        ("Provenance", _provenance(result)),
        ("Files", _files(artifacts)),
        ("Every number", _metrics(metrics)),
    ]
    filled = [(title, shown) for title, shown in parts if any(shown)]
    anchors = [(title.lower().replace(" ", "-"), title, shown) for title, shown in filled]
    links = "".join(f'<li><a href="#{anchor}">{escape(title)}</a></li>' for anchor, title, _ in anchors)
    body = [
        '<a class="skip" href="#content">Skip to the content</a>',
        f"<header>\n<h1>{escape(result.name)}</h1>\n{_opening(result, metrics, header)}\n</header>",
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>',
        '<main id="content">',
        *(section(anchor, title, *shown) for anchor, title, shown in anchors),
        "</main>",
    ]
    return document(f"{result.name}: report", "\n".join(body))


def _opening(result: RunResult, metrics: dict[str, Metric], header: Sequence[Fact]) -> str:
    """Return the conclusion, what failed, and the facts of the run, before anything else."""
    lines = [paragraph(f"Run {result.run_id}", "note")]
    lines.append(sentence(conclude(result, metrics), frozenset(metrics), "lead"))
    if "proxy" in result.labels:
        lines.append(paragraph(f"Proxy teacher: {result.labels['proxy']}"))
    bounded = [check for verdict in result.verdicts for check in verdict.checks if check.bound is not None]
    missed = [check for check in bounded if not check.passed]
    if missed:
        lines.append(paragraph(f"Verification failed: {len(missed)} of {len(bounded)} bounds missed.", "failed"))
    elif bounded:
        lines.append(paragraph(f"Verification passed: {len(bounded)} of {len(bounded)} bounds met.", "passed"))
    failed = [bench.id for bench in result.benchmarks if not bench.succeeded]
    if failed:
        lines.append(paragraph(f"Benchmarks failed: {', '.join(failed)}.", "failed"))
    lines.append(facts([(fact.name, fact.text) for fact in header]))
    return "\n".join(lines)


def _written(item: Table, known: frozenset[str]) -> str:
    return table(f"{item.before}{item.name}{item.after}", item.head, item.rows, known)


def _phases(result: RunResult) -> list[str]:
    rows: list[list[Cell]] = []
    for index, phase in enumerate(result.phases):
        counted = [
            number_cell(getattr(phase, name), f"phases[{index}].{name}")
            for name in ("steps", "tokens", "seconds", "loss", "val_loss")
        ]
        words = [Cell(text) for text in (phase.id, phase.phase, phase.trains)]
        rows.append([*words, *counted, Cell(phase.skipped or phase.checkpoint)])
    return [table("What was trained, in order", _PHASE_HEAD, rows)] if rows else []


def _failures(result: RunResult) -> list[str]:
    rows = [[Cell(bench.id), Cell(bench.error)] for bench in result.benchmarks if bench.error is not None]
    return [table("Benchmarks that stopped", ("Benchmark", "Reason"), rows)] if rows else []


def _omitted(omitted: Sequence[Omission]) -> list[str]:
    rows = [[Cell(item.name), Cell(item.reason)] for item in omitted]
    return [table("What has no data", ("What", "Reason"), rows)] if rows else []


def _provenance(result: RunResult) -> list[str]:
    rows = [
        [Cell("Manifest, SHA-256"), Cell(result.manifest_sha256, is_code=True)],
        [Cell("Git commit"), Cell(result.git_commit or "not in a repository", is_code=True)],
    ]
    blocks = [
        details(title, _json(value))
        for title, value in (("Environment", result.environment), ("Plan", result.plan))
        if value
    ]
    return [table("What the run was made from", ("What", "Is"), rows), *blocks]


def _json(value: Any) -> str:
    return json.dumps(to_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _files(artifacts: Sequence[Artifact]) -> list[str]:
    hashes = "".join(f"<li>{file_link(item.path)}, SHA-256 <code>{item.sha256}</code></li>" for item in artifacts)
    return [
        f"<p>{file_link('report.json')} holds every number of this page by key, and the hash of this page.</p>",
        f"<ul>{hashes}</ul>" if hashes else "",
    ]


def _metrics(metrics: dict[str, Metric]) -> list[str]:
    rows: list[list[Cell]] = []
    for metric in metrics.values():
        spread = Cell(NOTHING) if metric.spread is None else Cell(repr(metric.spread), is_number=True)
        count = Cell(NOTHING) if metric.n is None else Cell(str(metric.n), is_number=True)
        value = Cell(repr(metric.value), metric.key, is_number=True)
        rows.append([Cell(metric.key, is_code=True), value, Cell(metric.unit), spread, count, Cell(metric.source)])
    if not rows:
        return []
    ids = [metric_id(key) for key in metrics]
    return [
        table(
            "Every metric with all its digits; report.json marks standard errors",
            _METRIC_HEAD,
            rows,
            row_ids=ids,
        )
    ]
