"""What the section on batching says of the sides that are within the bound of time between tokens."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.usefixtures("bench")
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
