"""What `auto` chooses against batches set by hand: speed, memory, the time of planning, runs that fit. Writes JSON.

Parts, each the real command: `plan` measures batch and checkpointing and trains; `replay` is the same command again,
which plans in 0 s; `runs` takes a few steps of many more runs, none of which may run out of memory; `hand` fixes
batches around the chosen one; `modes` leaves compilation and workers open too, and ends when it is planned. Before
that nothing is compiled, which would be once for every batch. The JSON is written after every part. Called again, it
does what is missing: what was measured at another commit or on another machine is measured again.

Usage on a GPU: python scripts/bench/run.py planned [--parts plan,replay,runs,hand,modes] [--seconds 580] [--runs 20]
    [--work runs/bench_planned] [--out docs/benchmarks/planned.json] [-- OVERRIDES]
`--smoke --out FILE` plans, replays and runs twice within 5% of the memory, in a minute. On a CPU `--runs 2 --out FILE
-- model=tiny train.block_size=64 train.memory_utilization=0.02` shows that it works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cases.ladder import wait_for_end
from cases.training import head_commit
from record import Record
from registry import UsageError

from caramba.runs.events import read_events
from caramba.runtime import choose_device, device_facts

WORDS = [
    *("model=llama32_1b", "model.topology.layers.0.repeat=2"),  # widths of 1B; a run of it saves 0.5 GB
    *("model.embedder.vocab_size=2048", "data.vocab_size=2048", "train.block_size=2048"),
    "train.lr=3e-4",  # the preset's is for narrow models
    *("train=pretrain", "benchmark=none", "verify=none", "resume=never", "logger.tensorboard=false"),
]
AUTO = ["train.batch_size=auto", "train.activation_checkpointing=auto"]
MODES = ["train.compile_model=auto", "train.num_workers=auto", "train.steps=5000"]
STEPS = 24  # the speed of a run is that of its 4th to 23rd step
FEW = 3  # memory is at its peak in the second, which begins with all states
SHARES = (0.25, 0.5, 0.75, 1.1)  # of the chosen batch: what a hand would try, and one more than fits
PARTS = ("plan", "replay", "runs", "hand", "modes")
SMOKE = ("plan", "replay", "runs")
MUST_SPEED = 0.95


class OutOfTimeError(Exception):
    """The seconds of the call are over."""


class Bench:
    """The launches of one bench, in a folder that stays: the cached plan and an unfinished sweep are found again."""

    def __init__(self, words: Any, record: Record) -> None:
        self.record = record
        self.words, self.cache = words, words.work.absolute() / "cache"
        self.deadline = time.monotonic() + words.seconds
        self.base = [*WORDS, "train.compile_model=false", *words.overrides]
        self.machine = device_facts(choose_device("auto"))
        about = {"commit": head_commit(), "gpu": self.machine["name"], "words": self.base}
        known = record.read()
        is_same = all(known.get(key) == value for key, value in about.items()) and not words.again
        self.parts: dict[str, Any] = known["parts"] if is_same else {}
        self.result: dict[str, Any] = {
            **record.head(self.machine),
            **about,
            "command": " ".join(["caramba launch", *self.base, *AUTO]),
            "parts": self.parts,
        }
        # Sweeps resume in a folder that is theirs alone: a point that another commit finished is not skipped.
        self.work = words.work.absolute() / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
        if words.again:
            shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)

    def run(self, part: str) -> None:
        """Measure what is missing of a part."""
        getattr(self, f"_{part}")()

    def _plan(self) -> None:
        if "plan" not in self.parts:
            found = self._launch([*AUTO, f"train.steps={STEPS}", "plan=refresh"])
            self._keep("plan", found)

    def _replay(self) -> None:
        if "replay" not in self.parts and self._chosen():
            found = self._launch([*AUTO, f"train.steps={STEPS}"])
            found["is_same"] = found.pop("chosen") == self._chosen()
            self._keep("replay", found)

    def _hand(self) -> None:
        chosen = self._chosen()
        if "hand" in self.parts or not chosen:
            return
        sizes = sorted({max(1, round(share * chosen["batch_size"])) for share in SHARES})
        fixed = [f"train.{key}={value}" for key, value in chosen.items() if key != "batch_size"]
        swept = f"train.batch_size={','.join(map(str, sizes))}"
        _, said = self._sweep([swept, *fixed, f"train.steps={STEPS}"], "hand")
        rows: dict[str, Any] = {}
        for run in self._runs_in("hand"):
            manifest = json.loads((run / "manifest.json").read_text())
            size = manifest["groups"][0]["runs"][0]["train"]["batch_size"]
            events = list(read_events(run))
            speed = next((event for event in events if event["event"] == "speed"), {})
            rows[str(size)] = {
                "tokens_per_s": speed.get("tokens_per_s"),
                "out_of_memory": sum(event["event"] == "out_of_memory" for event in events),
                "finished": (run / "result.json").is_file(),
            }
        if not rows:
            raise RuntimeError(f"no batch by hand made a run; its output:\n{said}")
        self._keep("hand", dict(sorted(rows.items(), key=lambda item: int(item[0]))))

    def _runs(self) -> None:
        """A sweep over seeds, in turn in one process; what it has finished before is not repeated."""
        if self.parts.get("runs", {}).get("finished") == self.words.runs or not self._chosen():
            return
        seeds = ",".join(str(seed) for seed in range(1, self.words.runs + 1))
        began = time.monotonic()
        status, said = self._sweep([f"seed={seeds}", *AUTO, f"train.steps={FEW}"], "runs")
        runs = self._runs_in("runs")
        events = [event["event"] for path in runs for event in read_events(path)]
        found = {
            "status": status,
            "said": said,
            "seconds": time.monotonic() - began,
            "finished": sum((path / "result.json").is_file() for path in runs),
            "out_of_memory": events.count("out_of_memory"),
            "planned": events.count("planned"),
        }
        self._keep("runs", found)

    def _sweep(self, words: list[str], name: str) -> tuple[int, str]:
        """Run a sweep in a folder that stays: only points that are not finished run again."""
        folder = self.work / name
        folder.mkdir(exist_ok=True)
        base = [word for word in self.base if word != "resume=never"]  # which is about whole runs
        return self._call(["-m", *base, *words], folder)

    def _runs_in(self, name: str) -> list[Path]:
        return [path for path in (self.work / name).glob("runs/*/*") if (path / "events.jsonl").is_file()]

    def _modes(self) -> None:
        if "modes" not in self.parts:
            self._keep("modes", self._launch([*AUTO, *MODES, "plan=refresh"], until="planned"))

    def _chosen(self) -> dict[str, Any]:
        return self.parts.get("plan", {}).get("chosen", {})

    def _keep(self, part: str, found: dict[str, Any], said: dict[str, Any] | None = None) -> None:
        self.parts[part] = found
        self.result["musts"] = musts_of(self.parts)
        self.record.write_data(self.result)
        shown = {key: value for key, value in (said or found).items() if key not in ("plan", "said")}
        print(f"{part}: {json.dumps(shown)}", flush=True)

    def _launch(self, more: list[str], until: str | None = None) -> dict[str, Any]:
        """Run one launch in an empty folder and return what it left behind, which is removed."""
        folder = self.work / "one"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        began = time.monotonic()
        status, said = self._call([*self.base, *more], folder, until)
        run = next(folder.glob("runs/*/*"), None)
        if run is None:
            raise RuntimeError(
                f"caramba {' '.join([*self.base, *more])} made no run: exit status {status}; its output:\n{said}"
            )
        events = list(read_events(run))
        decisions = self._decisions(run)
        speed = next((event for event in events if event["event"] == "speed"), {})
        planning = decisions.get("planning", {})
        found = {
            "status": status,
            "said": said,
            "seconds": time.monotonic() - began,
            "planned_s": next((event["seconds"] for event in events if event["event"] == "planned"), 0.0),
            "allowed_s": (planning.get("measured") or {}).get("allowed_seconds"),
            "planning": planning.get("reason"),
            "out_of_memory": sum(event["event"] == "out_of_memory" for event in events),
            "tokens_per_s": speed.get("tokens_per_s"),
            "peak_bytes": speed.get("peak_bytes"),
            "chosen": {
                key: decisions[key]["value"]
                for key in ("batch_size", "activation_checkpointing", "compile_model")
                if key in decisions
            },
            "plan": {key: decisions[key] for key in ("batch_size", "compile_model") if key in decisions},
        }
        shutil.rmtree(folder)
        return found

    def _decisions(self, run: Path) -> dict[str, Any]:
        """Return what the run's plan decided; of one that was stopped before its first step, what the cache keeps."""
        cached = sorted(self.cache.glob("runtime_plans/*.json"), key=lambda path: path.stat().st_mtime)
        found = next((path for path in (run / "plan.json", *cached[-1:]) if path.is_file()), None)
        return {} if found is None else json.loads(found.read_text())["pretrain"]["decisions"]

    def _call(self, words: list[str], folder: Path, until: str | None = None) -> tuple[int, str]:
        """Run caramba; it is asked to stop when it has logged the event `until`, and when the time is up.

        Raises:
            OutOfTimeError: it was stopped for the time.
        """
        if time.monotonic() > self.deadline:
            raise OutOfTimeError
        environment = {**os.environ, "CARAMBA_HOME": str(self.cache)}
        log = self.work / "said.txt"
        with log.open("w") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "caramba", *words],
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
            is_late = False
            while child.poll() is None:
                time.sleep(0.2)
                is_late = time.monotonic() > self.deadline
                if is_late or (until is not None and _has_said(folder, until)):
                    wait_for_end(child)
        if is_late:
            raise OutOfTimeError
        return child.returncode, log.read_text(errors="replace")[-500:]


def _has_said(folder: Path, kind: str) -> bool:
    return any(event["event"] == kind for run in folder.glob("runs/*/*") for event in read_events(run))


def musts_of(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is asked of planning, what it was compared with, and whether that is met."""
    found: list[dict[str, Any]] = []

    def add(what: str, got: Any, limit: Any, is_met: bool) -> None:
        found.append({"what": what, "got": got, "limit": limit, "is_met": is_met})

    for part in ("plan", "modes"):
        if part in parts and parts[part]["allowed_s"] is not None:
            got, limit = parts[part]["planned_s"], parts[part]["allowed_s"]
            add(f"{part}: seconds of planning", got, limit, got <= limit)
    if "replay" in parts:
        got = parts["replay"]["planned_s"]
        add("second run: seconds of planning", got, 0.0, got == 0.0 and parts["replay"]["is_same"])
    rates = [row["tokens_per_s"] or 0.0 for row in parts.get("hand", {}).values() if not row["out_of_memory"]]
    own = [parts[part]["tokens_per_s"] for part in ("plan", "replay") if part in parts]
    if rates and any(rates) and own and None not in own:
        ratio = statistics.mean(own) / max(rates)
        add(f"batch: auto over the best of {len(rates)} by hand", ratio, MUST_SPEED, ratio >= MUST_SPEED)
    if "runs" in parts:
        run = parts["runs"]
        is_met = run["out_of_memory"] == 0 and run["status"] == 0
        add(f"out of memory in {run['finished']} runs", run["out_of_memory"], 0, is_met)
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument(
        "--seconds", type=float, default=580.0, help="after which what runs is stopped, to be done again"
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help=f"{', '.join(SMOKE)} in a minute")
    parser.add_argument("--again", action="store_true", help="measure what is in the file already, too")
    parser.add_argument("--work", type=Path, default=Path("runs/bench_planned"))
    parser.add_argument("overrides", nargs="*")


def run(given: argparse.Namespace, record: Record) -> int | None:
    unknown = set(given.parts.split(",")) - set(PARTS)
    if unknown:
        raise UsageError(f"--parts: got {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    if given.smoke:
        given.parts, given.runs = ",".join(SMOKE), 2
        given.overrides.append("train.memory_utilization=0.05")
    bench = Bench(given, record)
    for part in given.parts.split(","):
        try:
            bench.run(part)
        except OutOfTimeError:
            print(f"{part}: the time is up; call this again", flush=True)
            break
    for must in bench.result.get("musts", []):
        print(
            f"{must['what']}: {must['got']} (must {must['limit']}): {'met' if must['is_met'] else 'MISSED'}"
        )
    return 0
