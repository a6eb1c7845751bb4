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
TEXTS = ("heldout_2048", "wikitext2_raw_2048", "wikitext2_tokenised_2048", "heldout_512", "heldout_128")
POSITIONS = ("at_0_15", "at_16_63", "at_64_127", "at_128_255", "at_256_511", "at_512_1023", "at_1024_2047")
TASKS = ("hellaswag", "arc_easy", "arc_challenge", "piqa", "winogrande_full", "openbook_qa", "mmlu")
OTHER_TASKS = ("boolq", "lambada_openai", "blimp")


def ratio(text: dict[str, Any], name: str) -> str:
    """Return a ratio with its interval, or nothing where it was not measured."""
    if name not in text:
        return ""
    found = text[name]
    if "interval_95" not in found:
        return f"{found['ratio']:.3f}"
    low, high = found["interval_95"]
    return f"{found['ratio']:.3f} [{low:.3f}, {high:.3f}]"


def spread(value: dict[str, float]) -> str:
    """Return a ratio with its interval, rounded."""
    return f"{value['ratio']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *rows)]


def points(tasks: dict[str, Any], name: str) -> str:
    """Return a difference in points with its interval, or nothing where it was not measured."""
    if name not in tasks:
        return ""
    low, high = tasks[name]["interval_95"]
    return f"{tasks[name]['points']:+.2f} [{low:+.2f}, {high:+.2f}]"


def section(data: dict[str, Any]) -> str:
    """Return the section as Markdown."""
    students, teacher, control = data["students"], data["teacher"], data["control"]
    newest = [item for item in students if "text_against_control" in item]
    judged = [item for item in students if "tasks" in item and item not in newest]
    former = [item for item in students if "tasks" not in item]
    rows = [
        (
            f"{item['bytes_ratio']}x",
            item["label"],
            item["objective"],
            f"{item['tokens'] / 1e6:.1f}M",
            *(ratio(item["text"], name) for name in TEXTS[:3]),
            points(item.get("tasks", {}), "mean_six_full"),
            points(item.get("tasks_against_control", {}), "mean_six_full"),
        )
        for item in students
    ]
    rows.append(
        (
            "1x",
            "teacher, trained further",
            "CE",
            f"{control['tokens'] / 1e6:.1f}M",
            *(ratio(control["text"], name) for name in TEXTS[:3]),
            points(control["tasks"], "mean_six_full"),
            "",
        )
    )
    shown = [*judged, former[0]]
    against_control = [
        (
            name.removeprefix("at_").replace("_", " to "),
            *(ratio(item["text_against_control"], f"heldout_{name}") for item in newest),
        )
        for name in POSITIONS
    ]
    names = [f"{item['bytes_ratio']}x, {item['objective']}" for item in newest]
    positions = [
        (
            name.removeprefix("at_").replace("_", " to "),
            *(ratio(item["text"], f"heldout_{name}") for item in shown),
        )
        for name in POSITIONS
    ]
    tasks = [
        (
            name,
            f"{100 * teacher[name]:.2f}",
            *(points(item["tasks"], name) for item in (*newest, *judged, control)),
        )
        for name in (*TASKS, "mean_six_full", *OTHER_TASKS)
    ]
    formats = [
        (
            row["tag"],
            "" if row["sem"] is None else f"{row['sem']} + {row['geo']}",
            row["cache_format"] or "16 bits",
            str(row["bytes_per_layer"]),
            f"{row['bytes_ratio']:.2f}x",
            f"{row['ratio2048']:.3f}",
        )
        for row in sorted(data["formats"]["rows"], key=lambda row: row["bytes_per_layer"])
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
    heads = [f"{item['bytes_ratio']}x" for item in shown]
    heads[-1] += " in 16 bits"
    drops = ", ".join(f"{name} {drop:+.2f}" for name, drop in data["published"]["drops"].items())
    return "\n".join(
        [
            START,
            "",
            f"Measured on one {data['device']}, {data['date']}, and one {control['device']}, {control['date']}; one "
            f"seed. {data['what']}.",
            "",
            f"Ratios are the student's perplexity over the teacher's, with a {data['interval']}. "
            f"Windows: {data['windows']}. Task differences "
            "are points of the mean of six tasks (zero shots), paired by item.",
            "",
            *table(
                (
                    "fewer bytes a token",
                    "latent + rotary",
                    "objective",
                    "tokens",
                    *TEXTS[:3],
                    "six tasks, less teacher",
                    "less control",
                ),
                rows,
            ),
            "",
            f"The control is {control['what']}. The published drops from such a control are {drops} "
            f"({data['published']['source']}). The teacher's perplexities are "
            + ", ".join(f"{teacher[f'{name}_perplexity']:.2f} ({name})" for name in TEXTS[:3])
            + ".",
            "",
            f"*KL* students learn the teacher's distribution, *KL and CE* ones the text as well. CONTROL is the "
            f"control as a teacher: that student saw {2 * newest[0]['tokens'] / 1e6:.1f}M tokens with its teacher's, "
            "and its teacher is a second run of the control's command. Students and control of one GPU are compared, "
            f"{control['device']} for the first {len(newest)} rows.",
            "",
            *(
                f"- {item['bytes_ratio']}x, {item['objective']}: `{item['command']}`"
                for item in (*newest, *shown)
            ),
            f"- Control: `{control['command']}`",
            "",
            f"Training text: {data['training_text']['new']}. The students in 16 bits had "
            f"{data['training_text']['old']}. Of the students of KL alone the first took "
            f"{judged[0]['wall_seconds']} s from start to end ({judged[0]['note']}); the second "
            f"{judged[1]['wall_seconds']} s ({judged[1]['note']}). Measured with plan=off, benchmark=none and "
            "verify=none.",
            "",
            "Bytes: four exact first tokens add 92,160 bytes a sequence. A cache keeps its last 64 tokens in 16 bits; "
            "the judge rounds all tokens.",
            "",
            "Perplexity over the control's by position in windows of 2,048 tokens of the held-out encyclopedia:",
            "",
            *table(("positions", *names), against_control),
            "",
            "The same over the teacher's, for students of KL alone:",
            "",
            *table(("positions", *heads), positions),
            "",
            "Tasks (teacher in percent, the others in points less the teacher):",
            "",
            *table(
                ("task", "teacher", *names, *(f"{item['bytes_ratio']}x, KL" for item in judged), "control"),
                tasks,
            ),
            "",
            f"Multi-head latent attention (`surgery.target: mla`) for stock engines: {data['mla']['what']}. Over the "
            f"teacher's perplexity {spread(data['mla']['mla_over_teacher'])}, `target: caramba` at the same bytes "
            f"{spread(data['mla']['caramba_over_teacher'])}.",
            "",
            f"Width and precision under one budget ({data['formats']['what']}):",
            "",
            *table(
                ("model", "latent + rotary", "format", "bytes a layer and token", "fewer bytes", "ratio"),
                formats,
            ),
            "",
            f"Untrained students in 16 bits ({data['untrained']['what']}):",
            "",
            *table(
                ("surgery", "latent + rotary", "exact first tokens", "ratio at 2,048", "ratio at 128"),
                untrained,
            ),
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
