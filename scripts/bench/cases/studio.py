"""How long `caramba studio` takes over a thousand runs of 10,000 points, and how long Chromium takes to show its page.

Usage: python scripts/bench/run.py studio [--runs 1000] [--points 10000] [--repeats 5] [--out FILE]

The first call reads every run, the later ones the index. The first view ends when curves and table are laid out.
Chromium is the program of that name on the search path; playwright drives it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import tempfile
from pathlib import Path

from cases.collect_runs import SEEDS, finish, median_seconds
from record import Record, machine_facts

from caramba.launch.freeze import freeze
from caramba.runs import mint

FIRST_VIEW = "() => Number(document.documentElement.dataset.ready)"
FIRST_PAINT = (
    "() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"
)


def write_events(run: Path, points: int, number: int) -> None:
    """Write a noisy loss, its rate and its speed, as the trainer does at each step."""
    noise = random.Random(number)
    lines = ['{"time": 1.0, "event": "phase_started", "phase": "pretrain", "step": 0, "earlier_s": 0.0}']
    for step in range(1, points + 1):
        loss = 2 + 5 * math.exp(-step / (300 + number)) + 0.1 * noise.random()
        lines.append(
            f'{{"time": {1 + step / 10:.3f}, "event": "metrics", "phase": "pretrain", "step": {step}, "values": '
            f'{{"running_loss": {loss:.6f}, "lr": {1e-3 * (1 - step / points):.8f}, "tokens_per_s": 10240.0}}}}'
        )
    (run / "events.jsonl").write_text("\n".join([*lines, '{"time": 2000.0, "event": "run_finished"}', ""]))


def first_views(page: Path, repeats: int) -> list[dict[str, float]]:
    """Return milliseconds from the start of the navigation until the first view is laid out, and is painted."""
    from playwright.sync_api import sync_playwright

    found: list[dict[str, float]] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for _ in range(repeats):
            tab = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            tab.goto(page.as_uri())
            found.append({"painted_ms": tab.evaluate(FIRST_PAINT), "laid_out_ms": tab.evaluate(FIRST_VIEW)})
            tab.close()
        browser.close()
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)


def run(options: argparse.Namespace, record: Record) -> int | None:
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        manifest = freeze(["model=tiny_dba"]).manifest
        for number in range(options.runs):
            words = [f"train.lr={(number // SEEDS + 1) / 1000}", f"seed={number % SEEDS}"]
            made = mint(manifest, words, Path("runs"))
            finish(made, number)
            write_events(made, options.points, number)
        page = Path(name) / "studio.html"
        cold = median_seconds(["studio", "--out", str(page)], 1)
        commands = {
            "studio": ["studio", "--out", str(page)],
            "status": ["status"],
            "collect": ["collect", "runs"],
        }
        warm = {command: median_seconds(words, options.repeats) for command, words in commands.items()}
        views = first_views(page, options.repeats)
        size = page.stat().st_size
        data = size - page.read_text().rpartition('id="data">')[2].find("</script>")
    result = {
        "runs": options.runs,
        "points": options.points,
        "first_call_s": cold,
        "median_s": warm,
        "page_bytes": size,
        "page_bytes_without_data": data,
        "first_view_ms": {key: statistics.median(view[key] for view in views) for key in views[0]},
        "views": views,
    }
    print(json.dumps(result, indent=2))
    record.write_data({**record.head(machine_facts()), "load_after": os.getloadavg()[0], "result": result})
