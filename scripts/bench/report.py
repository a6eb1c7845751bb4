"""Make docs/benchmarks.md and the measured part of docs/results.md from JSON files, by the templates in page/.

Usage: python scripts/bench/report.py [--check]   (--check exits 1 when a page is not what the JSON gives)
NAME.md.j2 is of benchmark NAME, results.md.j2 of docs/benchmarks/smollm2.json. A file with the key `closed` is not
measured again: its case is in the history, at the commit that the key gives.
A newline after a statement is left out. `x|f(".1f")` formats a number; `opt` leaves out what is missing.
"""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jinja2
import verdicts
from plots import draw_memory, draw_smollm2
from record import DEFAULT_FOLDER as FOLDER

from caramba.runs.files import write_whole

TEMPLATES = Path(__file__).with_name("page")
PAGE, RESULTS = Path("docs/benchmarks.md"), Path("docs/results.md")
RESULTS_MARKS = "<!-- from smollm2.json -->", "<!-- end of smollm2.json -->"
GROUPS = {
    "Quality": ("first_light", "upcycle_proxy"),
    "Training": (
        *("training", "step_profile", "ladder", "planned", "scaling", "tensor_parallel_step"),
        *("lightning_overhead", "blockwise_cost", "surgery_cost"),
    ),
    "Inference": ("inference", "prefill", "batching", "speculation", "cached_steps"),
    "Kernels": (
        *("attention_backends", "decode", "documents", "kernels", "linear_cross_entropy"),
        *("optimizer_steps", "row_linear", "step_kernels"),
    ),
    "Commands and data": ("launch_times", "substrate", "prepare", "collect_runs", "studio", "sweep_overhead"),
}
ELSEWHERE = (
    "smollm2",
    "house",
    "paired_tests",
    "harness_items",
    "export_memory",
    "engines",
    "optimizers",
    "orchestrator",
    "orchestrator_cost",
    "memory",
    "research_gate",
    "research_aa",
    "research_attacks",
)
"""Shown by docs/results.md, evidence.md, export.md, memory.md, orchestrator.md and research.md."""


def optional(value: Any, spec: str, missing: str = "", *, scale: float = 1.0) -> str:
    """Format a number, or return `missing` where there is none."""
    if value is None or isinstance(value, jinja2.Undefined):
        return missing
    return format(value * scale if scale != 1.0 else value, spec)


def spread(row: dict[str, Any], unit: str, spec: str) -> str:
    """Write a median with its middle 60 percent."""
    median, low, high = (format(row[f"{name}_{unit}"], spec) for name in ("median", "p20", "p80"))
    return f"{median} ({low} to {high})"


def environment() -> jinja2.Environment:
    """Return Jinja with the filters of the templates, and the functions of verdicts.py by their names."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        trim_blocks=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    made.filters |= {
        "f": format,
        "opt": optional,
        "spread": spread,
        "median": statistics.median,
        "part": lambda text, at: text.split(".")[at],
        "over": lambda ours, theirs: [a / b for a, b in zip(ours, theirs, strict=True)],
    }
    made.tests["match_start"] = lambda text, start: text.startswith(start)
    made.globals |= dict(inspect.getmembers(verdicts, inspect.isfunction))
    return made


def has_section(name: str) -> bool:
    return (TEMPLATES / f"{name}.md.j2").is_file()


def section(name: str, data: dict[str, Any]) -> str:
    """Return the part of the page about one file; its heading is of the second level."""
    return environment().get_template(f"{name}.md.j2").render({**data, "data": data}).rstrip()


def render() -> str:
    """Return the page: a summary, then sections by group."""
    files = {file: json.loads(file.read_text()) for file in sorted(FOLDER.glob("*.json")) if file.stem not in ELSEWHERE}
    parts = [section("summary", {})]
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        for name in names:
            for file, data in files.items():
                if data["benchmark"] == name:
                    body = section(name, data).splitlines()
                    parts.append("\n".join(f"#{line}" if line.startswith("#") else line for line in body))
                    machine = ", ".join(f"{key} {value}" for key, value in data["machine"].items())
                    source = f"Source: `{file}`, by `{data['made_by']}`, on {machine}."
                    if closed := data.get("closed"):
                        source += f" Closed record of commit {closed['commit']}: `git show {closed['script']}`."
                    parts.append(source)
    return "\n\n".join(parts) + "\n"


def render_results() -> str:
    """Return docs/results.md with the part between its marks made again."""
    start, end = RESULTS_MARKS
    before, rest = RESULTS.read_text(encoding="utf-8").split(start)
    made = section("results", json.loads((FOLDER / "smollm2.json").read_text(encoding="utf-8")))
    return f"{before}{start}\n{made}\n{end}{rest.split(end)[1]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    pages = {PAGE: render(), RESULTS: render_results()}
    if parser.parse_args().check:
        return int(any(not page.is_file() or page.read_text() != text for page, text in pages.items()))
    for page, text in pages.items():
        write_whole(page, text)
    drawn = {"smollm2": (draw_smollm2, ["smollm2"]), "memory": (draw_memory, ["memory", "memory_baselines"])}
    for name, (draw, sources) in drawn.items():
        write_whole(
            FOLDER / f"{name}.png", draw(*(json.loads((FOLDER / f"{source}.json").read_text()) for source in sources))
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
