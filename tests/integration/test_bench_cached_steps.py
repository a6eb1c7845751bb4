"""The bench of cached against uncached decodes runs through, counts what it says, and its section renders."""

from __future__ import annotations

import importlib
import json
import statistics
from pathlib import Path
from types import ModuleType

SIDES = ("cached", "uncached", "uncached, all logits")


def test_a_short_bench_gives_ratios_of_turns_and_says_whether_the_must_is_met(
    tmp_path: Path, bench: ModuleType
) -> None:
    out = tmp_path / "cached_steps.json"
    words = ("--models", "tiny", "--new", "24", "--repeats", "3", "--out", str(out))
    assert bench.main(["cached_steps", *words]) == 0
    data = json.loads(out.read_text())
    rows = {row["side"]: row for row in data["rows"]}
    assert tuple(rows) == SIDES
    assert all(row["text_is_that_of_uncached"] for row in rows.values())
    cached, uncached = (rows[name]["cpu_seconds"] for name in SIDES[:2])
    turns = [theirs / own for own, theirs in zip(cached, uncached, strict=True)]
    assert rows["cached"]["over_uncached"] == statistics.median(turns)
    assert rows["cached"]["range_over_uncached"] == [min(turns), max(turns)]
    (must,) = data["musts"]
    assert (must["model"], must["reached"], must["must"]) == ("tiny", statistics.median(turns), 10)
    section = importlib.import_module("report").section
    for is_met, said in ((True, "must 10x: met."), (False, "must 10x: not met.")):
        must["met"] = is_met
        text = section("cached_steps", data)
        assert text.endswith(said)
        assert f"| {statistics.median(turns):.1f}x ({min(turns):.1f} to {max(turns):.1f}) |" in text
