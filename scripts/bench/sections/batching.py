"""Section of the benchmarks page about batching of requests."""

from __future__ import annotations

from typing import Any


def batching(data: dict[str, Any]) -> list[str]:
    """Throughput and latency of static and continuous batching, and a batch over one request at a time."""
    words, must = data["settings"], data["must"]
    runs = "one run" if words["repeats"] == 1 else f"medians of {words['repeats']} runs"
    lines = [
        f"## Batching requests ({words['model']}, {words['layout']}, {words['slots']} slots)",
        "",
        f"{words['requests']} requests arrive randomly, {words['rate']:g} a second; prompts of {words['prompt'][0]} to"
        f" {words['prompt'][1]} tokens and {words['new'][0]} to {words['new'][1]} new ones, log-uniform; {runs}."
        " Both sides run the same steps and differ in when a request may join.",
        "",
        "| batching | steps | cache, GB | tokens/s | over static | between tokens, ms, p50 / p99 |"
        " to the first, ms, p50 / p99 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['way']} | {row['ran']} | {_gigabytes(row)} | {row['tokens_per_s']:.0f} |"
        f" {_over_static(row, data)} | {row['itl_p50_ms']:.2f} / {row['itl_p99_ms']:.2f} |"
        f" {row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f} |"
        for row in data["arrivals"]
    ]
    if "over_static" in data:
        lines += [
            "",
            f"Continuous over static: **{data['over_static']:.2f}x** the throughput {_at_must(data)}"
            f" (must: {must['throughput']:g}x). At other bounds of that time: {_bounds(data)}.",
        ]
    if "over_one_at_a_time" in data:
        one, many = sorted(data["batch"], key=lambda row: row["at_once"])
        lines += [
            "",
            f"Equal requests of {words['batch_prompt']} and {words['batch_new']} tokens: one at a time"
            f" {one['tokens_per_s']:.0f} tokens/s, {many['at_once']} at once {many['tokens_per_s']:.0f}:"
            f" **{data['over_one_at_a_time']:.1f}x** (must: {must['batch']:g}x for 64).",
        ]
    return lines


def _gigabytes(row: dict[str, Any]) -> str:
    """Return the bytes of a side's cache, if recorded."""
    return f"{row['cache_bytes'] / 1e9:.2f}" if "cache_bytes" in row else ""


def _over_static(row: dict[str, Any], data: dict[str, Any]) -> str:
    """Return a side's throughput over that of static batching."""
    base = next((other for other in data["arrivals"] if other["way"] == "static"), None)
    return "" if base in (None, row) else f"{row['tokens_per_s'] / base['tokens_per_s']:.2f}x"


def _at_must(data: dict[str, Any]) -> str:
    """Return the time between tokens of the must, and which kind of batching exceeds it."""
    held_to = data["settings"]["itl_ms"]
    bound = f"{held_to:g} ms between tokens (p99)"
    if data["is_within_bound"]:
        return f"with at most {bound}"
    row = next(row for row in data["at_equal_p99"] if row["itl_p99_within_ms"] == held_to)
    sides = {"static": row["static_is_within"], "continuous": row["way"] is not None}
    late = [name for name, is_within in sides.items() if not is_within]
    if len(late) == 2:
        return f"with more than {bound} in both"
    return f"with more than {bound} in {late[0]} batching alone"


def _bounds(data: dict[str, Any]) -> str:
    """Say the ratio within every bound of the time between tokens."""
    found = []
    for row in data["at_equal_p99"]:
        ratio = "none" if row["over_static"] is None else f"{row['over_static']:.2f}x"
        found.append(f"{row['itl_p99_within_ms']:.2f} ms {ratio}")
    return ", ".join(found)
