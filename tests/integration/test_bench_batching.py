"""The bench of batching runs through on any machine and its section renders."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest


def test_a_tiny_bench_measures_both_ways_of_batching(
    tmp_path: Path, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "batching.json"
    words = [
        *("batching", "--device", "cpu", "--model", "tiny", "--slots", "4", "--requests", "6"),
        *("--prompt", "4,12", "--new", "2,16", "--batch-prompt", "4", "--batch-new", "8", "--chunks", "16"),
        *("--ahead", "0,2", "--itl-ms", "60000", "--rate", "1000", "--repeats", "1", "--out", str(out)),
    ]
    assert bench.main([*words, "--seconds", "0.001"]) == 0
    assert "5 sides left" in capsys.readouterr().out
    assert bench.main(words) == 0
    data = json.loads(out.read_text())
    assert [row["way"] for row in data["arrivals"]] == [
        "static",
        "continuous, 16 prompt tokens a step",
        "continuous, 16 prompt tokens a step, 2 prompts ahead",
    ]
    assert all(
        0 < row["itl_p50_ms"] <= row["itl_p99_ms"] and row["ttft_p50_ms"] > 0 for row in data["arrivals"]
    )
    assert [row["at_once"] for row in data["batch"]] == [1, 4]
    assert min(data["over_static"], data["over_one_at_a_time"]) > 0
    static, *ways = data["arrivals"]
    continuous = max(ways, key=lambda row: row["tokens_per_s"])
    *others, widest = data["at_equal_p99"]
    assert widest == {
        "itl_p99_within_ms": 60000,
        "way": continuous["way"],
        "static_is_within": True,
        "over_static": data["over_static"],
    }
    assert data["over_static"] == continuous["tokens_per_s"] / static["tokens_per_s"]
    assert data["is_within_bound"] is True
    (strict,) = [row for row in others if row["itl_p99_within_ms"] == static["itl_p99_ms"]]
    assert (strict["over_static"] is None) == all(row["itl_p99_ms"] > static["itl_p99_ms"] for row in ways)
    page = importlib.import_module("report").section("batching", data)
    assert "| static | eager | 0.00 |" in page
    assert f"| {data['over_static']:.2f}x |" in page
    assert "At other bounds of that time:" in page
    assert f"**{data['over_static']:.2f}x** the throughput" in page
    # With nothing left to measure the same call writes what it read.
    capsys.readouterr()
    assert bench.main(words) == 0
    assert "0 sides left" in capsys.readouterr().out
    assert json.loads(out.read_text()) == data


@pytest.mark.parametrize(
    ("static", "continuous", "over", "said"),
    [
        ((9.0, 10.0), ((8.0, 30.0), (11.0, 50.0)), 3.0, "with at most 10 ms between tokens (p99) ("),
        (
            (12.0, 10.0),
            ((8.0, 30.0), (11.0, 50.0)),
            3.0,
            "more than 10 ms between tokens (p99) in static batching alone",
        ),
        ((9.0, 10.0), ((13.0, 30.0), (11.0, 50.0)), 5.0, "(p99) in continuous batching alone"),
        ((12.0, 10.0), ((13.0, 30.0), (11.0, 50.0)), 5.0, "(p99) in both"),
    ],
)
def test_the_page_says_which_way_of_batching_is_later_than_the_bound(
    static: tuple[float, float],
    continuous: tuple[tuple[float, float], ...],
    over: float,
    said: str,
    bench: ModuleType,
) -> None:
    batching, report = (importlib.import_module(name) for name in ("cases.batching", "report"))
    sides = {"static": static, **{f"chunks {n}": side for n, side in enumerate(continuous)}}
    times = dict.fromkeys(("itl_p50_ms", "ttft_p50_ms", "ttft_p99_ms"), 1.0)
    rows = [
        {"way": way, "ran": "graph", "itl_p99_ms": p99, "tokens_per_s": speed, **times}
        for way, (p99, speed) in sides.items()
    ]
    settings = {"model": "tiny", "layout": "gqa", "slots": 4, "requests": 6, "rate": 1.0, "itl_ms": 10.0}
    settings |= {"prompt": (1, 2), "new": (1, 2), "repeats": 1}
    data = {"settings": settings, "must": batching.MUST, "arrivals": rows, "batch": []}
    data |= batching.ratios(data)
    assert data["over_static"] == over
    assert data["is_within_bound"] == ("at most" in said)
    page = report.section("batching", data)
    assert f"**{over:.2f}x** the throughput with " in page
    assert said in page
