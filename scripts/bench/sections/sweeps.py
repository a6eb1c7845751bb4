"""Sections of the benchmarks page about sweeps and what is made of them."""

from __future__ import annotations

from typing import Any


def sweep_overhead(data: dict[str, Any]) -> list[str]:
    """A sweep against the same runs started one by one."""
    found = data["result"]
    first, last = (kib / 1024 for kib in found["checking_peak_kib"])
    return [
        f"## A sweep of {found['points']} tiny points, {found['jobs']} at a time",
        "",
        "| | wall, s | CPU, s |",
        "|---|---|---|",
        f"| `launcher=process` sweep | {found['sweep_s']:.1f} | {found['sweep_cpu_s']:.1f} |",
        f"| the same runs by themselves | {found['bare_s']:.1f} | {found['bare_cpu_s']:.1f} |",
        "",
        f"Overhead: **{100 * found['overhead']:.1f}%** of wall time, {100 * found['overhead_cpu']:.1f}% of CPU time"
        f" (required: under 15%; load average before: {data['load_before']:.1f}). Memory of the front end:"
        f" {first:.0f} MiB after checking 8 points, {last:.0f} MiB after {found['points']},"
        f" {found['front_end_peak_kib'] / 1024:.0f} MiB at most while it drives the sweep.",
    ]


def collect_runs(data: dict[str, Any]) -> list[str]:
    """Reading many runs."""
    found = data["result"]
    rows = [
        f"| `caramba {name}` | {times['wall']:.2f} | {times['cpu']:.2f} |"
        for name, times in found["median_s"].items()
    ]
    return [
        f"## Reading {found['runs']:,} finished runs (required of collect: under {found['limit_s']:.0f} s)",
        "",
        "| command | wall, s | CPU, s |",
        "|---|---|---|",
        *rows,
        "",
        f"Whole processes, medians; load average after: {data['load_after']:.1f}.",
    ]


def studio(data: dict[str, Any]) -> list[str]:
    """One page of many runs."""
    found = data["result"]
    rows = [
        f"| `caramba {name}` | {times['wall']:.2f} | {times['cpu']:.2f} |"
        for name, times in (
            ("studio, first call", found["first_call_s"]),
            *found["median_s"].items(),
        )
    ]
    view = found["first_view_ms"]
    return [
        f"## One page of {found['runs']:,} runs of {found['points']:,} points",
        "",
        "| command | wall, s | CPU, s |",
        "|---|---|---|",
        *rows,
        "",
        f"First view in Chromium: **{view['painted_ms'] / 1000:.2f} s** from the start of the navigation until it is"
        f" painted (required: 1.0 s), {view['laid_out_ms'] / 1000:.2f} s until it is laid out. The page has"
        f" {found['page_bytes'] / 1e6:.1f} MB, {found['page_bytes_without_data'] / 1e6:.2f} MB without its data"
        f" (required: 1 MB). Medians; load average after: {data['load_after']:.1f}.",
    ]
