"""Writes the files of a run for its readers."""

from __future__ import annotations

from pathlib import Path

from caramba.artifacts.controls import CONTROLS_FILE, collect_skipped_controls, draw_controls
from caramba.artifacts.header import read_facts
from caramba.artifacts.items import ITEMS_FILE, items_csv
from caramba.artifacts.ladder import LADDER_FILE, TRAINING_LADDER_FILE, draw_ladder, draw_training_ladder
from caramba.artifacts.latex import build_tables
from caramba.artifacts.metrics import collect, find_undefined_ratios
from caramba.artifacts.optimizers import OPTIMIZERS_FILE, draw_optimizers
from caramba.artifacts.page import build_page
from caramba.artifacts.recall import (
    FAR_BACK_FILE,
    POSITION_FILE,
    RECALL_FILE,
    draw_by_position,
    draw_far_back,
    draw_recall,
)
from caramba.artifacts.report import Omission, build_report
from caramba.artifacts.rows import (
    CASES_FILE,
    cases_csv,
    collect_skipped_rows,
    missing_reason,
    omit_if_asked,
    to_csv,
)
from caramba.artifacts.style import Picture
from caramba.artifacts.summary import (
    LATENCY_FILE,
    MEMORY_FILE,
    SUMMARY_FILE,
    draw_latency,
    draw_memory,
    draw_summary,
)
from caramba.artifacts.tables import list_tables
from caramba.artifacts.training_curves import SLOTS_FILE, TRAINING_FILE, draw_memory_slots, draw_training
from caramba.artifacts.transplant import CSV_FILE, TRANSPLANT_FILE, draw_transplant, transplant_csv
from caramba.result import Artifact, ArtifactIndex, Metric, RunResult
from caramba.runs.files import sha256_of, write_json, write_whole

REPORT_FILE, PAGE_FILE, TABLES_FILE = "report.json", "report.html", "tables.tex"
_NO_PICTURE = Picture(b"", b"", b"")
CSV_KINDS = ("perplexity", "latency", "memory")
# Their files are missed only where such a benchmark was asked for.
ASKED_KINDS = ("accuracy", "controls", "weights", "inference_ladder", "ladder")


def write(result: RunResult, run_dir: Path) -> ArtifactIndex:
    """Write `run_dir/artifacts/` and return its files with their hashes, report.json first.

    report.html links to the files next to it and holds the figures; report.json is written last and lists the others,
    so it is there only when all of them are. A file without data is left out and listed under "omitted" with the
    reason; one left by an earlier call is removed.

    Raises:
        CarambaError: a metric or another value of the report is not finite or malformed; nothing is written then.
    """
    folder = run_dir / "artifacts"
    metrics = collect(result)
    build_report(result, metrics, (), ())  # refuses what cannot be reported before a file is touched
    texts, pictures, omitted = _contents(result, metrics, run_dir)
    contents: dict[str, str | bytes | None] = dict(texts)
    for name, picture in pictures.items():
        contents |= dict.fromkeys(_NO_PICTURE.files(name)) if picture is None else picture.files(name)
    (folder / REPORT_FILE).unlink(missing_ok=True)
    for name, content in contents.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            write_whole(folder / name, content)
    written = [name for name, content in contents.items() if content is not None]
    files = tuple(Artifact(name, sha256_of(folder / name)) for name in written)
    tables = list_tables(result, metrics)
    write_whole(
        folder / PAGE_FILE,
        build_page(result, metrics, tables, pictures, files, omitted, read_facts(result, run_dir)),
    )
    files = (*files, Artifact(PAGE_FILE, sha256_of(folder / PAGE_FILE)))
    write_json(folder / REPORT_FILE, build_report(result, metrics, files, tuple(omitted)))
    report = Artifact(REPORT_FILE, sha256_of(folder / REPORT_FILE))
    return ArtifactIndex(str(folder), (report, *files))


def _contents(
    result: RunResult, metrics: dict[str, Metric], run_dir: Path
) -> tuple[dict[str, str | None], dict[str, Picture | None], list[Omission]]:
    """Return every text file and picture but the report, None for one without data, and all that is omitted."""
    pictures: dict[str, Picture | None] = {}
    contents: dict[str, str | None] = {f"{kind}.csv": to_csv(result, kind) for kind in CSV_KINDS}
    omitted = [
        Omission(f"{kind}.csv", missing_reason(result, kind)) for kind in CSV_KINDS if contents[f"{kind}.csv"] is None
    ]
    for kind in ASKED_KINDS:
        contents[f"{kind}.csv"] = to_csv(result, kind)
        if contents[f"{kind}.csv"] is None:
            omitted += omit_if_asked(result, kind, f"{kind}.csv")
    contents[CASES_FILE] = cases_csv(result)
    contents[ITEMS_FILE] = items_csv(result)
    labels, (ladder, missing) = result.labels, draw_ladder(result)
    drawn: list[tuple[str, Picture | None, list[Omission]]] = [
        (SUMMARY_FILE, *draw_summary(result, metrics)),
        (LATENCY_FILE, *draw_latency(result, metrics)),
        (MEMORY_FILE, *draw_memory(result, metrics)),
        (TRAINING_FILE, *draw_training(run_dir, labels)),
        (SLOTS_FILE, draw_memory_slots(run_dir, labels), []),
        (POSITION_FILE, draw_by_position(result), []),
        (RECALL_FILE, draw_recall(result, metrics), []),
        (FAR_BACK_FILE, draw_far_back(result, metrics), []),
        (CONTROLS_FILE, draw_controls(result), collect_skipped_controls(result)),
        (LADDER_FILE, ladder, [*missing, *collect_skipped_rows(result)]),
        (TRAINING_LADDER_FILE, *draw_training_ladder(result)),
        (OPTIMIZERS_FILE, *draw_optimizers(result)),
        (TRANSPLANT_FILE, *draw_transplant(result)),
    ]
    for name, picture, missing in drawn:
        pictures[name] = picture
        omitted += missing
    contents[CSV_FILE] = transplant_csv(result)
    contents[TABLES_FILE] = build_tables(result, metrics)
    if contents[TABLES_FILE] is None:
        omitted.append(Omission(TABLES_FILE, "no benchmark and no verification has a row for a table"))
    omitted += [Omission(item.key, item.reason) for item in find_undefined_ratios(result)]
    return contents, pictures, omitted
