"""report.html: a whole run on one page that opens from disk, every number linked to its key, spread and source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from caramba.artifacts.by_position import PLOT_FILE as POSITION_FILE
from caramba.artifacts.conclusion import conclude
from caramba.artifacts.controls import PLOT_FILE as CONTROLS_FILE
from caramba.artifacts.curves import LATENCY_FILE, MEMORY_FILE
from caramba.artifacts.header import Fact
from caramba.artifacts.ladder import PLOT_FILE as LADDER_FILE
from caramba.artifacts.markup import (
    details,
    document,
    facts,
    figure,
    file_link,
    metric_id,
    paragraph,
    section,
    sentence,
    table,
)
from caramba.artifacts.optimizers import PLOT_FILE as OPTIMIZERS_FILE
from caramba.artifacts.recall import FAR_BACK_FILE
from caramba.artifacts.recall import PLOT_FILE as RECALL_FILE
from caramba.artifacts.report import Omission
from caramba.artifacts.style import Picture
from caramba.artifacts.summary import FILE as SUMMARY_FILE
from caramba.artifacts.tables import NOTHING, Cell, Table, number
from caramba.artifacts.training_curves import PLOT_FILE as TRAINING_FILE
from caramba.artifacts.training_ladder import PLOT_FILE as TRAINING_LADDER_FILE
from caramba.artifacts.transplant import PLOT_FILE as TRANSPLANT_FILE
from caramba.result import Artifact, Metric, RunResult, to_plain

# Sections that tables and figures make up: title, labels of tables, and figures with their captions.
_MEASURED = (
    (
        "Summary",
        ("comparison", "stages"),
        ((SUMMARY_FILE, "Perplexity by stage, throughput and cache, as bars"),),
    ),
    (
        "Training",
        (),
        (
            (
                TRAINING_FILE,
                "Training and held-out loss, learning rate and throughput; dashed lines are phase borders",
            ),
        ),
    ),
    ("Controls", ("controls",), ((CONTROLS_FILE, "Perplexity ratio against KV ratio, a point per control"),)),
    ("Weights in 8 and 4 bits", ("weights",), ()),
    (
        "Inference ladder",
        ("ladder",),
        ((LADDER_FILE, "Decode throughput by rung, with the speed-up over the first"),),
    ),
    (
        "Training ladder",
        ("training_ladder",),
        (
            (
                TRAINING_LADDER_FILE,
                "Training throughput and peak memory by row, with the change of held-out loss",
            ),
        ),
    ),
    (
        "Optimisers",
        ("optimizers",),
        ((OPTIMIZERS_FILE, "Training loss by tokens and by time; triangles are switches"),),
    ),
    ("From scratch", ("variants",), ()),
    (
        "Verification",
        ("verification", "cases"),
        ((POSITION_FILE, "Perplexity ratio by position in the window"),),
    ),
    (
        "Long-term memory",
        ("recall", "contexts", "depths"),
        (
            (RECALL_FILE, "Recall by pairs, by bytes of the cache and by length of the context"),
            (FAR_BACK_FILE, "Keys found in held-out text by depth, and perplexity by position"),
        ),
    ),
    ("Accuracy", ("accuracy",), ()),
    ("Generated text", ("generation",), ()),
    (
        "Time and memory",
        ("throughput",),
        (
            (LATENCY_FILE, "Decode throughput and prefill time against prompt length"),
            (MEMORY_FILE, "Bytes of the cache against sequence length, with the bytes of the weights"),
        ),
    ),
    (
        "Transplant",
        ("transplant",),
        ((TRANSPLANT_FILE, "Error and energy kept by attention layer, above what each layer caches"),),
    ),
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
    for title, labels, figures in _MEASURED:
        shown = [_written(found[label], known) for label in labels if label in found]
        shown += [
            figure(pictures.get(name), _ALT.format(caption=caption), caption, name)
            for name, caption in figures
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
        lines.append(
            paragraph(f"Verification failed: {len(missed)} of {len(bounded)} bounds missed.", "failed")
        )
    elif bounded:
        lines.append(
            paragraph(f"Verification passed: {len(bounded)} of {len(bounded)} bounds met.", "passed")
        )
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

        def cell(field: str, value: float | None, index: int = index) -> Cell:
            key = f"phases[{index}].{field}"
            return Cell(NOTHING) if value is None else Cell(number(value), key, is_number=True)

        counted = [
            cell(name, getattr(phase, name)) for name in ("steps", "tokens", "seconds", "loss", "val_loss")
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
    hashes = "".join(
        f"<li>{file_link(item.path)}, SHA-256 <code>{item.sha256}</code></li>" for item in artifacts
    )
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
        rows.append(
            [Cell(metric.key, is_code=True), value, Cell(metric.unit), spread, count, Cell(metric.source)]
        )
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
