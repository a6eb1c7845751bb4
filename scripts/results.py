"""Write the measured part of docs/results.md from docs/benchmarks/smollm2.json.

Usage: python scripts/results.py [--check]   (--check exits 1 when the page is not what the JSON gives)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PAGE, SOURCE = Path("docs/results.md"), Path("docs/benchmarks/smollm2.json")
START, END = "<!-- from smollm2.json -->", "<!-- end of smollm2.json -->"
TEXTS = ("heldout_2048", "heldout_512", "heldout_128", "wikitext2_raw_2048", "wikitext2_tokenised_2048")
POSITIONS = ("at_0_15", "at_16_63", "at_64_127", "at_128_255", "at_256_511", "at_512_1023", "at_1024_2047")


def ratio(text: dict[str, Any], name: str) -> str:
    """Return a ratio with its interval, or nothing where it was not measured."""
    if name not in text:
        return ""
    found = text[name]
    if "interval_95" not in found:
        return f"{found['ratio']:.3f}"
    low, high = found["interval_95"]
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}]"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def section(data: dict[str, Any]) -> str:
    """Return the section as Markdown."""
    students = data["students"]
    heads = [f"{item['bytes_ratio']}x, {item['tokens'] / 1e6:.1f}M tokens" for item in students]
    heads[-1] += " (before)"
    rows = [
        (
            name,
            *(f"{value:.2f}" for value in [data["teacher"][f"{name}_perplexity"]]),
            *(ratio(s["text"], name) for s in students),
        )
        for name in TEXTS
    ]
    positions = [
        (
            name.removeprefix("at_").replace("_", " to "),
            *(ratio(item["text"], f"heldout_{name}") for item in students[:2]),
        )
        for name in POSITIONS
    ]
    untrained = [
        (
            row["tag"],
            f"{row['sem']} + {row['geo']}",
            str(row["first"]),
            f"{row['ratio2048']:.2f}",
            f"{row['ratio128']:.2f}",
        )
        for row in data["untrained"]["rows"]
        if "sem" in row  # the failed refit is in docs/log.md
    ]
    teacher = data["teacher"]
    return "\n".join(
        [
            START,
            f"Measured on one {data['device']}, {data['date']}, one seed. {data['what']}. Ratios are the student's "
            f"perplexity over the teacher's, with a {data['interval']}. Windows: {data['windows']}.",
            "",
            *table(("text", "teacher perplexity", *heads), rows),
            "",
            f"The first student took {students[0]['train_seconds']:.0f} s of training. Command: "
            f"`{students[0]['command']}`; measured with {data['run_as']}.",
            "",
            f"Bytes: {data['bytes']}. The students differ in steps and rate ({students[0]['lr']:g} and "
            f"{students[1]['lr']:g}), so they isolate neither; another process used the GPU during the second.",
            "",
            "Ratio by position in windows of 2,048 tokens of the held-out encyclopedia:",
            "",
            *table(("positions", *heads[:2]), positions),
            "",
            f"Untrained students ({data['untrained']['what']}):",
            "",
            *table(
                ("surgery", "latent + rotary", "exact first tokens", "ratio at 2,048", "ratio at 128"),
                untrained,
            ),
            "",
            f"The teacher's six-task mean is {100 * teacher['mean_six_full']:.2f} (MHA2MLA's tasks, zero shots). The "
            "students' tasks are not measured yet.",
            END,
        ]
    )


def main() -> int:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(START)
    after = rest.split(END)[1]
    made = before + section(json.loads(SOURCE.read_text(encoding="utf-8"))) + after
    if "--check" in sys.argv:
        return int(made != page)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
