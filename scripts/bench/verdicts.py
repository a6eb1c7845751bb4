"""What figures of docs/benchmarks are compared with, as functions that the templates in page/ and some cases call."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from record import DEFAULT_FOLDER

ROOF_ON_RECORD = {"NVIDIA H200": 4.48e12}
"""Read roofs of devices. A machine on which a plain reduction reads less, while decode attention reads more than that,
is compared with the read bandwidth on record."""
DECODE_MUST = {"q8_0": 0.78, "q4_0": 0.60, "nf4": 0.55, "mixed": 0.60}
LARGE, STEADY = 100e6, 30e6  # bytes from which shares of quantised formats hold, and the time of bf16
INFERENCE_MUST = {"short": 1.25, "16-bit cache": 830, "mixed cache": 1000, "batch": 2.0}
"""Over the static loop; tokens/s behind 32k tokens; student over teacher."""
LOOP = {512: 925, 4096: 823}
"""Tokens/s of a static loop by its cache, as first measured on an H200: the bench's own, whose attention is what
Inductor makes of it, was slower in every run, by how much differs."""

Row = dict[str, Any]


def met(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def read_bandwidth_of(data: Row) -> float:
    """Return the bytes per second that shares and musts of decode attention are of."""
    return max(data["read_roof_bytes_per_s"] or 0.0, ROOF_ON_RECORD.get(data["machine"].get("device", ""), 0.0))


def roof_share(row: Row, roof: float) -> float:
    """Return the share of a roof that a row's useful bytes reach."""
    return row["useful_bytes"] / row["median_us"] * 1e6 / roof


def decode_must(row: Row, roof: float) -> str:
    """Return what a row of decode attention has to reach and whether it does."""
    if row["format"] == "bf16" and row["useful_bytes"] >= STEADY:
        limit = row["useful_bytes"] / (0.9 * roof) * 1e6 + 10
        return f"{limit:.1f} us: {'met' if row['median_us'] <= limit else 'missed'}"
    share = DECODE_MUST.get(row["format"])
    if share is None or row["useful_bytes"] < LARGE:
        return ""
    return f"{100 * share:.0f}%: {'met' if roof_share(row, roof) >= share else 'missed'}"


def memory_bound(row: Row, roof: float) -> float:
    """Return the tokens per second at which weights and cache are read once a step at the roof."""
    return row["batch"] * roof / row["bytes_of_step"]


def inference_must(row: Row, rows: list[Row], is_full: bool) -> str:
    """Return the figure that a row of whole decodes is judged by."""
    case, side, speed = ("batch", "context", "cache"), row["side"], row["tok_s"]
    beside = {
        other["side"]: other
        for other in reversed(rows)
        if "tok_s" in other and all(other.get(key) == row.get(key) for key in case)
    }
    if row["part"] == "short":
        static = beside.get("static loop")
        if static is None or side.startswith("static loop"):
            return ""
        text = f"{speed / static['tok_s']:.2f}x the static loop"
        known = LOOP.get(row["cache"]) if is_full else None
        if known is None or side.endswith("library products"):
            return text
        return f"{text}, {speed / known:.2f}x its {known} on record (must {INFERENCE_MUST['short']}x of both)"
    if row["part"] in ("weights", "caches"):
        plain = next((beside[name] for name in beside if name in ("16 bits", "bf16", "fp32")), None)
        return "" if plain in (None, row) else f"{speed / plain['tok_s']:.2f}x {plain['side']}"
    if row["part"] == "long":
        return f"must {INFERENCE_MUST[side]:,} on an H200" if is_full else ""
    if side != "student":
        return ""
    must = f" (must {INFERENCE_MUST['batch']}x)" if row["part"] == "batch" and is_full else ""
    return f"{speed / beside['teacher']['tok_s']:.2f}x the teacher{must}"


def training_verdicts(part: Row) -> list[str]:
    """Return an empty line, then for every required figure whether it was reached.

    Of float8 it is the recipe that ran through the Trainer. A ratio of two optimisers does not measure Lightning.
    """

    def held(got: float, must: Row) -> str:
        return f"(must {must['limit']:g}): {met(got >= must['limit'])}"

    if "over_bf16" in part:
        got, recipe = part["over_bf16"]["caramba"], f"caramba with float8={part['float8']}"
        return [
            "",
            *(f"{got:.3f} over {must['over']}, by {recipe} {held(got, must)}." for must in part["musts"]),
        ]
    is_alike = part.get("bare_optimizer") == "ours"
    said = [
        f"{must['got']:.3f} over {must['over']} "
        + (
            held(must["got"], must)
            if is_alike or must["over"] != "our model bare"
            else f"(must {must['limit']:g}): not comparable"
        )
        for must in part.get("musts", [])
    ]
    return ["", f"{'; '.join(said)}."] if said else []


def summary(folder: Path = DEFAULT_FOLDER) -> Iterable[tuple[str, str, str]]:
    """Return the main figures: the JSON's name, what, and value."""

    def read(name: str) -> Row:
        return json.loads((folder / f"{name}.json").read_text())

    best = read("smollm2")["students"][0]
    words = f"perplexity ratio at {best['bytes_ratio']}x fewer cached bytes (SmolLM2-135M, held-out encyclopedia)"
    yield "smollm2", words, f"{best['text']['heldout_2048']['ratio']:.3f}"
    training = read("training")["parts"]["bf16 8x2048"]["rows"]
    ours, theirs = (training[name]["tokens_per_s"] for name in ("caramba", "transformers"))
    value = f"{ours:,.0f} tokens/s, {ours / theirs:.2f}x transformers"
    yield "training", "training of a 1B model on one H200", value
    ladder = {item["what"]: item["got"] for item in read("ladder")["musts"]}
    yield "ladder", "training ladder, fastest row over row 0", f"{ladder['speed over row 0']:.1f}x"
    scaling = read("scaling")
    shares = (row["of_linear"] for row in scaling["rows"] if (row["strategy"], row["devices"]) == ("ddp", 4))
    ddp = max(share for share in shares if share is not None)
    yield "scaling", "pretraining of a 1B model by ddp on four H200", f"{ddp:.1%} of linear"
    decode = next(row for row in read("inference")["rows"] if row["side"] == "captured")
    yield "inference", f"decode of a 1B model, {decode['case']}", f"{decode['tok_s']:,.0f} tokens/s"
    yield "batching", "serving under load, over static batching", f"{read('batching')['over_static']:.2f}x"
    commands = {item["command"]: item["median_s"] for item in read("launch_times")["commands"]}
    plan = next(command for command in commands if command.startswith("caramba compile"))
    yield "launch_times", f"`{plan}`", f"{commands[plan]:.2f} s"
    overhead = f"{100 * read('lightning_overhead')['overhead']['median']:.2f}%"
    yield "lightning_overhead", "cost of Lightning and all callbacks, of a step", overhead
