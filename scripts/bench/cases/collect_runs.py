"""How long `caramba collect` and `caramba status` take over a thousand runs, in fresh processes. Writes JSON.

Usage: python scripts/bench/run.py collect_runs [--runs 1000] [--repeats 3] [--out FILE]

The runs are made by the real writers: a minted directory, events, a report with the metrics of a small upcycle, a
result. Only the figures are left out, which nobody collects.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
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
from caramba.runs.sweeps import Point, create_sweep

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
    for step in range(10, 301, 10):
        values = {"loss": 2.0, "running_loss": 2.0, "lr": 1e-3, "tokens_per_s": 1e4}
        append_event(run, "metrics", phase="pretrain", step=step, values=values)
    append_event(run, "run_finished")
    write_json(run / "artifacts" / "report.json", build_report(result, collect(result), (), ()))
    write_json(run / "result.json", {"status": "finished", **to_plain(result)})


def make(root: Path, runs: int) -> Path:
    """Make a sweep of finished runs and return its directory."""
    manifest = freeze(["model=tiny_dba"]).manifest
    points = [
        Point(number, [f"train.lr={(number // SEEDS + 1) / 1000}", f"seed={number % SEEDS}"], str(number))
        for number in range(runs)
    ]
    sweep = create_sweep(
        manifest.name,
        ["train.lr=choice(…)", "seed=range(10)"],
        "ab" * 32,
        [(point, manifest) for point in points],
        root=root,
    )
    for point in points:
        run = mint(manifest, point.overrides, root)
        sweep.link(point, run)
        finish(run, point.number)
        point.state = "finished"
    sweep.save()
    return sweep.folder


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)


def run(options: argparse.Namespace, record: Record) -> int | None:
    with tempfile.TemporaryDirectory() as name:
        sweep = make(Path(name) / "runs", options.runs)
        commands = {
            "collect": ["collect", str(sweep)],
            "collect --csv --tex --plot": [
                "collect",
                str(sweep),
                "--csv",
                "--tex",
                "--plot",
                "--out",
                f"{name}/out",
            ],
            "status": ["status", str(Path(name) / "runs")],
        }
        seconds = {name: median_seconds(words, options.repeats) for name, words in commands.items()}
    print(json.dumps(seconds, indent=2))
    record.write_data(
        {
            **record.head(machine_facts()),
            "load_after": os.getloadavg()[0],
            "result": {"runs": options.runs, "limit_s": 1.5, "median_s": seconds},
        },
    )
