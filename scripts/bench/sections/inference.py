"""Section of the benchmarks page about whole decodes, and its plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MUST = {"short": 1.25, "16-bit cache": 830, "mixed cache": 1000, "batch": 2.0}
"""Over the static loop; tokens/s behind 32k tokens; student over teacher."""
LOOP = {512: 925, 4096: 823}
"""Tokens/s of a static loop by its cache, as first measured on an H200: the bench's own, whose attention is what
Inductor makes of it, was slower in every run, by how much differs."""
TITLES = {
    "short": "Batch 1, short prefix, grouped-query model",
    "weights": "Batch 1, short prefix, weights of fewer bits",
    "long": "Batch 1, long prefix, llama32_dba",
    "batch": "A batch, llama32_dba_384b against its grouped-query teacher",
    "caches": "A batch, the grouped-query model with caches of fewer bits",
    "context": "Batch 1 against context, llama32_dba_384b and its teacher",
}


def inference(data: dict[str, Any]) -> list[str]:
    """Tokens per second by case, with what they are to reach."""
    roof, is_full = data["read_bytes_per_s"], data["size"] == "1b"
    lines = [
        f"## Decoding ({data['size']}, random weights)",
        "",
        f"Greedy, prefill not counted; median (middle 60%) of runs in turns. Memory reads at {roof / 1e9:,.0f} GB/s.",
    ]
    for part, title in TITLES.items():
        rows = [row for row in data["rows"] if row["part"] == part]
        if not rows:
            continue
        lines += [
            "",
            f"{title}:",
            "",
            "| batch x context | cache | side | ran as | tokens/s | of the memory bound | reached |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            where = f"| {row['batch']} x {row['context']} | {row.get('cache', '')} | {row['side']}"
            if "skipped" in row:
                lines.append(f"{where} | not run: {row['skipped']} | | | |")
                continue
            ran = row["ran"] + (f" ({row['why_not']})" if row.get("why_not") else "")
            speed = f"{row['tok_s']:,.1f} ({row['p20']:,.1f} to {row['p80']:,.1f})"
            share = f"{100 * row['tok_s'] / bound(row, roof):.0f}%" if "bytes_of_step" in row else ""
            lines.append(f"{where} | {ran} | {speed} | {share} | {share_of_must(row, rows, is_full)} |")
    if data["left_out"]:
        lines += ["", f"Left out: {'; '.join(data['left_out'])}."]
    errors = [row["peer_error"] for row in data["rows"] if "peer_error" in row]
    if errors:
        lines += [
            "",
            "The static loop is compiled whole, captured by hand, and reads its cache to the end; it holds the same"
            f" weights, and its logits differ from ours by {max(errors):.1e} at most (relative).",
        ]
    if any(row["part"] == "context" for row in data["rows"]):
        lines += ["", "![Tokens per second against context](benchmarks/inference.png)"]
    return lines


def cached_steps(data: dict[str, Any]) -> list[str]:
    """Decoding with a cache and without one."""
    first = data["rows"][0]
    lines = [
        f"## Decoding with and without a cache, {first['new_tokens']} tokens",
        "",
        "One thread, eager steps unless stated. Without a cache each token costs a forward over all before it. Ratios"
        " are of the CPU seconds of runs of one turn: the median over the turns, and the range; load averages before"
        f" and after {data['load_before']:.1f} and {data['load_after']:.1f}.",
        "",
        "| model | side | tokens/s | a CPU second | over uncached | over uncached with all logits | same text |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        ratios = []
        for other in ("uncached", "uncached, all logits"):
            low, high = row[f"range_over_{other}"]
            ratios.append(f"{row[f'over_{other}']:.1f}x ({low:.1f} to {high:.1f})")
        is_same = "yes" if row["text_is_that_of_uncached"] else "no"
        lines.append(
            f"| {row['model']} | {row['side']} | {row['tok_s']:,.0f} | {row['tok_cpu_s']:,.0f} | {' | '.join(ratios)} |"
            f" {is_same} |"
        )
    for must in data["musts"]:
        state = "met" if must["met"] else "not met"
        lines += [
            "",
            f"{must['model']} over uncached, whose loop computes the last logits alone: {must['reached']:.1f}x, must"
            f" {must['must']:g}x: {state}.",
        ]
    return lines


def speculation(data: dict[str, Any]) -> list[str]:
    """Tokens per second with and without drafts."""
    words = data["settings"]
    lines = [
        f"## Speculation, {words['new']} tokens behind {words['prompt']}, {words['prompts']} prompts, "
        f"temperature {words['temperature']:g}",
        "",
        "| batch | method | ran as | tokens/s | over the best plain | ms a step | of a plain step | drafts accepted | "
        "tokens a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        drafts = ("", "")
        if "acceptance_rate" in row:
            drafts = (f"{100 * row['acceptance_rate']:.0f}%", f"{row['tokens_per_step']:.2f}")
        lines.append(
            f"| {row['batch']} | {row['way']} | {row['ran']} | {row['tok_s']:,.1f} | {row['against_best_plain']:.2f}x |"
            f" {row['step_ms']:.3f} | {row['step_against_best_plain']:.2f} | {drafts[0]} | {drafts[1]} |"
        )
    return [*lines, "", "Must at batch 1: 1.5x the best plain steps."]


def bound(row: dict[str, Any], roof: float) -> float:
    """Return the tokens per second at which weights and cache are read once a step at the roof."""
    return row["batch"] * roof / row["bytes_of_step"]


def share_of_must(row: dict[str, Any], rows: list[dict[str, Any]], is_full: bool) -> str:
    """Return the figure that a row is judged by, and of models of full size what it must be."""
    case = ("batch", "context", "cache")
    beside = [
        other for other in rows if "tok_s" in other and all(other.get(key) == row.get(key) for key in case)
    ]
    if row["part"] == "short":
        static = next((other for other in beside if other["side"] == "static loop"), None)
        if static is None or row["side"].startswith("static loop"):
            return ""
        text = f"{row['tok_s'] / static['tok_s']:.2f}x the static loop"
        known = LOOP.get(row["cache"]) if is_full else None
        if known is None or row["side"].endswith("library products"):
            return text
        return f"{text}, {row['tok_s'] / known:.2f}x its {known} on record (must {MUST['short']}x of both)"
    if row["part"] in ("weights", "caches"):
        plain = next((other for other in beside if other["side"] in ("16 bits", "bf16", "fp32")), None)
        return "" if plain in (None, row) else f"{row['tok_s'] / plain['tok_s']:.2f}x {plain['side']}"
    if row["part"] == "long":
        return f"must {MUST[row['side']]:,} on an H200" if is_full else ""
    if row["side"] != "student":
        return ""
    ratio = row["tok_s"] / next(other["tok_s"] for other in beside if other["side"] == "teacher")
    return f"{ratio:.2f}x the teacher" + (
        f" (must {MUST['batch']}x)" if row["part"] == "batch" and is_full else ""
    )


def plot(data: dict[str, Any], file: Path) -> None:
    """Draw tokens per second over context for teacher and student, with the memory bound of each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for side, colour in (("teacher", "#0072B2"), ("student", "#D55E00")):
        rows = sorted(
            (row for row in data["rows"] if row["part"] == "context" and row["side"] == side),
            key=lambda row: row["context"],
        )
        xs, ys = [row["context"] for row in rows], [row["tok_s"] for row in rows]
        errors = [[row["tok_s"] - row["p20"] for row in rows], [row["p80"] - row["tok_s"] for row in rows]]
        axes.errorbar(xs, ys, yerr=errors, marker="o", color=colour, capsize=3, label=side)
        limits = [bound(row, data["read_bytes_per_s"]) for row in rows]
        axes.plot(xs, limits, color=colour, linestyle="--", linewidth=1, label=f"{side}, memory bound")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="tokens of context", ylabel="tokens/s, batch 1")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=150)
    plt.close(figure)
