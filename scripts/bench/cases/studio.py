"""Seconds of `caramba studio`, `status` and `collect` over a thousand runs, and until Chromium shows the page.

Usage: python scripts/bench/run.py studio [--runs 1000] [--points 10000] [--repeats 5] [--out FILE]

The runs are made by the real writers, with 10,000 points each. The first
call reads every run, the later ones the index. The first view ends when curves and table are laid out.
Chromium is the program of that name on the search path; playwright drives it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import Record, machine_facts

from caramba.artifacts.metrics import collect
from caramba.artifacts.report import build_report
from caramba.launch.freeze import freeze
from caramba.result import BenchmarkResult, Metric, PhaseResult, RunResult, to_plain
from caramba.runs import mint
from caramba.runs.events import append_event
from caramba.runs.files import write_json

FIRST_VIEW = "() => Number(document.documentElement.dataset.ready)"
FIRST_PAINT = (
    "() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()), 0)))"
)


SEEDS = 10


def finish(run: Path, number: int) -> None:
    """Write what a finished run leaves, with the metrics of the default experiment at five prompt lengths."""
    metrics: list[Metric] = []
    for model in ("teacher", "student"):
        value = 20.0 + number % SEEDS + (number // SEEDS) / 100
        metrics += [
            Metric(f"perplexity.{model}.{name}", value, "", 256, 0.1, "ppl") for name in ("perplexity", "nll")
        ]
        for prompt in (64, 128, 256, 512, 1024):
            for name in ("prefill_ms", "decode_ms", "ttft_ms", "itl_ms", "tok_s"):
                key = f"latency.{model}.{name}@prompt={prompt},gen=32,batch=1"
                metrics.append(Metric(key, value, "ms", 5, 0.1, "lat"))
    phases = (PhaseResult("pretrain", "pretrain", "student", 300, 10_000, 9.0, "", 2.0),)
    environment = json.loads((run / "env.json").read_text())
    bench = BenchmarkResult("all", "perplexity", tuple(metrics))
    result = RunResult(
        run.parent.name, run.name, "ab" * 32, None, environment, {}, phases, benchmarks=(bench,)
    )
    append_event(run, "run_started")
    append_event(run, "run_finished")
    write_json(run / "artifacts" / "report.json", build_report(result, collect(result), (), ()))
    write_json(run / "result.json", {"status": "finished", **to_plain(result)})


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


def median_seconds(words: list[str], repeats: int) -> dict[str, float]:
    """Median seconds of a command from start to exit: wall time and CPU time."""
    times: list[float] = []
    busy: list[float] = []
    for _ in range(repeats):
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "caramba", *words], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(time.perf_counter() - began)
        busy.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"wall": statistics.median(times), "cpu": statistics.median(busy)}


OPTIONS = "--runs=1000 --points=10000 --repeats=5"


def run(options: argparse.Namespace, record: Record) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        manifest = freeze(["model=tiny_dba"]).manifest
        for number in range(options.runs):
            words = [f"train.lr={(number // SEEDS + 1) / 1000}", f"seed={number % SEEDS}"]
            made = mint(manifest, words, Path("runs"))
            finish(made, number)
            write_events(made, options.points, number)
        page = Path(name) / "studio.html"
        studio = ["studio", "--out", str(page)]
        cold = median_seconds(studio, 1)
        commands = {"studio": studio, "status": ["status"], "collect": ["collect", "runs"]}
        warm = {command: median_seconds(words, options.repeats) for command, words in commands.items()}
        views = first_views(page, options.repeats)
        size = page.stat().st_size
        data = size - page.read_text().rpartition('id="data">')[2].find("</script>")
    record.start(machine_facts(), load_after=os.getloadavg()[0])
    result = {"runs": options.runs, "points": options.points, "first_call_s": cold, "median_s": warm}
    result |= {"page_bytes": size, "page_bytes_without_data": data, "views": views}
    result["first_view_ms"] = {key: statistics.median(view[key] for view in views) for key in views[0]}
    print(json.dumps(result, indent=2))
    record.save(result=result)
