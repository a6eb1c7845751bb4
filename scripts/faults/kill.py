"""Kill and interrupt commands at points that the seed draws, restart them, and compare with an undisturbed run.

`python scripts/faults/kill.py --seed 1 --count 100 --jobs 2` sends SIGKILL at 100 random points of launch, resume,
sweep, export and prepare (or those of `--only`), and INT, HUP and TERM at 40 points of training (`--signals`). `late`
counts signals that came when their process had ended by itself. It prints a JSON result and exits 1 if a
start leaves files behind, weights differ in a bit, or a signal loses a recorded step.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from caramba.runs.events import metric_rows, read_events
from caramba.runs.files import is_locked

Found = dict[str, Any]
LIMIT_S = 300.0
MOST_LATE, MOST_ROUNDS = 10, 5
BAD = ("leftovers", "unequal", "failed", "steps_lost")
COMMANDS = ("launch", "resume", "sweep", "export", "prepare")
TINY = (
    *("model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu"),
    *("settings.instrument=none", "data.max_bytes=200000", "data.vocab_size=400"),
    *("model.embedder.vocab_size=400", "train.compile=false", "train.batch_size=2", "train.block_size=32"),
)
TRAIN = (*TINY, "train.steps=60")
LAUNCH = ("launch", *TRAIN, "train.save_every=7")
SWEEP = ("-m", *TRAIN, "train.save_every=7", "seed=1,2", "launcher=process", "launcher.n_jobs=2")
# No save is due, so that a signal that does not save loses every step.
SIGNALLED = ("launch", *TRAIN, "train.steps=400", "train.save_every=1000")
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)
MINTED = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}(-\d+)?")
# Each start of a run writes logs of its own, and a lock file stays in a folder that was locked.
IGNORED = re.compile(r"(^|/)(\.lock|logs/.*|tensorboard/.*)$")


class Place:
    """A folder in which one command is started again and again, with the caches of all of them."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        quiet = {"CARAMBA_HOME": str(home), "OMP_NUM_THREADS": "1", "CARAMBA_GIT_PATCH": "off"}
        self.variables = {**os.environ, **quiet}
        folder.mkdir(parents=True)

    def start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start `caramba WORDS`; its output is appended to log.txt."""
        with open(self.folder.with_suffix(".log"), "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "caramba", *words],
                cwd=self.folder,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def finish(self, words: Sequence[str]) -> float:
        """Run a command to its end and return its seconds."""
        began = time.monotonic()
        status = self.start(words).wait(LIMIT_S)
        if status != 0:
            text = self.folder.with_suffix(".log").read_text(errors="replace")
            raise RuntimeError(f"caramba {' '.join(words)} in {self.folder}: exit status {status}\n{text[-3000:]}")
        return time.monotonic() - began

    def runs(self) -> list[Path]:
        """Return the run directories, of which a folder that lacks its manifest is one too."""
        return sorted(item for item in self.folder.glob("runs/*/*") if MINTED.fullmatch(item.name))

    def has(self, suffix: str) -> bool:
        """Whether a file or folder below has a name that ends so; they come and go meanwhile."""
        walked = os.walk(self.folder)
        return any(name.endswith(suffix) for _, folders, files in walked for name in (*folders, *files))

    def wait_for_workers(self) -> None:
        """Wait until no worker of a killed front end holds a run."""
        limit = time.monotonic() + LIMIT_S
        while any(is_locked(run) for run in self.runs()):
            if time.monotonic() > limit:
                raise RuntimeError(f"{self.folder}: a worker did not end within {LIMIT_S:.0f} s")
            time.sleep(0.1)

    def listing(self) -> list[str]:
        """Return every file below the folder, with the stamps of run directories left out."""
        names = (str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if not file.is_dir())
        return sorted(re.sub(r"\d{8}-\d{6}", "STAMP", name) for name in names if not IGNORED.search(name))

    def contents(self) -> dict[str, str]:
        """Return a digest of each file of weights, tensor by tensor, and of each token file."""
        found: dict[str, str] = {}
        for file in sorted(self.folder.rglob("*")):
            name = re.sub(r"\d{8}-\d{6}", "STAMP", str(file.relative_to(self.folder)))
            if file.suffix == ".safetensors":
                found[name] = _tensors_sha256(file)
            elif file.suffix == ".npy":
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        return found


def _tensors_sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with safe_open(file, "pt") as weights:
        for name in sorted(weights.keys()):
            value = weights.get_tensor(name)
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(-1).numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Scenario:
    """A command, what starts it again, and how long it takes undisturbed."""

    name: str
    words: tuple[str, ...]
    reference: Place
    seconds: float

    def restart_command(self, place: Place) -> tuple[str, ...]:
        """Return the words that continue it: those it was started with, for a resume those of its run."""
        begun = [run for run in place.runs() if (run / "plan.json").is_file()]
        # A run that has its result has finished, and a launch would start another one.
        is_finished = len(begun) == 1 and (begun[0] / "result.json").is_file()
        if len(begun) == 1 and (self.name == "resume" or (self.name == "launch" and is_finished)):
            return ("resume", str(begun[0]))
        return self.words


def scenarios(root: Path, home: Path, only: Sequence[str]) -> Iterator[Scenario]:
    """Run each command that `only` names, or all, once undisturbed."""
    corpus = root / "corpus.txt"
    corpus.write_text("".join(f"line {number}: {number * number} of a text to prepare\n" for number in range(20000)))
    launched = Place(root / "reference-launch", home)
    launched.finish(LAUNCH)  # It fills the caches, so that the second one measures the start.
    trained = launched.runs()[0]
    commands = {
        "launch": LAUNCH,
        "resume": LAUNCH,
        "sweep": SWEEP,
        "export": ("export", str(trained), "--out", "exported", "--force"),
        "prepare": ("prepare", "text", str(corpus), "--output", "tokens", "--train-bpe", "400"),
    }
    for name in only or COMMANDS:
        words = commands[name]
        place = Place(root / f"reference-{name}-timed", home)
        yield Scenario(name, words, place, place.finish(words))


def moment(scenario: Scenario, place: Place, chance: random.Random) -> Callable[[], bool]:
    """Return what tells that the random point of a kill has come: a time, or if sooner some time after a file."""
    limit = time.monotonic() + chance.uniform(0.0, scenario.seconds)
    name = chance.choice((None, "overrides.txt", "plan.json", ".state.pt", ".part", ".safetensors"))
    extra, seen = chance.choice((0.0, chance.uniform(0.0, 1.0))), [0.0]

    def has_come() -> bool:
        now = time.monotonic()
        if name is not None and not seen[0] and place.has(name):
            seen[0] = now
        return now > limit or (bool(seen[0]) and now >= seen[0] + extra)

    return has_come


def send(process: subprocess.Popen[bytes], how: signal.Signals, has_come: Callable[[], bool]) -> bool:
    """Send a signal at its moment; return False if the process ended before that."""
    while process.poll() is None:
        if has_come():
            process.send_signal(how)
            return True
        time.sleep(0.002)
    return False


def compare(scenario: Scenario, place: Place) -> dict[str, list[str]]:
    """Return how a place differs from the one of the undisturbed command."""
    ours, theirs = place.listing(), scenario.reference.listing()
    leftovers = [f"{scenario.name}: {name}" for name in ours if name not in theirs or ours.count(name) > 1]
    leftovers += [f"{scenario.name}: {name} is missing" for name in theirs if name not in ours]
    after = place.contents()
    before = scenario.reference.contents().items()
    unequal = [f"{scenario.name}: {name}" for name, digest in before if after.get(name) != digest]
    return {"leftovers": leftovers, "unequal": unequal}


def plan_kills(count: int, n_scenarios: int, seed: int) -> list[tuple[int | None, int]]:
    """Return a scenario and the number of its kills, place by place, `count` kills in all."""
    chance, planned = random.Random(seed), list[tuple[int | None, int]]()
    while (left := count - sum(kills for _, kills in planned)) > 0:
        planned.append((len(planned) % n_scenarios, min(chance.randint(1, 5), left)))
    return planned


def kill_at_random(scenario: Scenario, kills: int, place: Place, chance: random.Random) -> Found:
    """Kill a command `kills` times, starting it again each time; let it finish then, and compare."""
    sent, late, words = 0, 0, scenario.words
    while sent < kills and late < MOST_LATE:
        process = place.start(words)
        if send(process, signal.SIGKILL, moment(scenario, place, chance)):
            sent += 1
        else:
            late += 1
        process.wait(LIMIT_S)
        words = scenario.restart_command(place)
    found: Found = {"sent": {f"KILL {scenario.name}": sent}, "late": late}
    try:
        place.finish(words)
    except RuntimeError as error:
        return {**found, "failed": [str(error)]}
    place.wait_for_workers()
    return {**found, "comparisons": 1, **compare(scenario, place)}


def signal_at_random(signals: int, place: Place, chance: random.Random) -> Found:
    """Send INT, HUP or TERM to one training `signals` times; count the recorded steps that no state holds."""
    sent: collections.Counter[str] = collections.Counter()
    leftovers: list[str] = []
    reached, late, steps_lost = 0, 0, 0
    words: tuple[str, ...] = SIGNALLED
    while sent.total() < signals:
        process = place.start(words)
        how = chance.choice(SIGNALS)
        is_there = functools.partial(_is_at, place, reached + chance.randint(0, 80), chance.uniform(0.0, 0.2))
        if not send(process, how, is_there):
            late += 1
            break
        sent[how.name] += 1
        process.wait(LIMIT_S)
        (run,) = place.runs()
        reached = max((step for _, step, _ in metric_rows(run)), default=0)
        words = ("resume", str(run))
        if any(event["event"] == "phase_finished" for event in read_events(run)):
            break
        steps_lost += max(0, reached - _saved_step(run))
        if left := sorted(file.name for file in run.rglob("*.part")):
            leftovers.append(f"{how.name}: {left}")
    process.wait(LIMIT_S)
    return {"sent": sent, "late": late, "steps_lost": steps_lost, "leftovers": leftovers}


def _is_at(place: Place, step: int, extra: float) -> bool:
    """Whether training has recorded a row of `step` or later, and `extra` seconds have passed since."""
    for run in place.runs():
        events = run / "events.jsonl"
        if events.is_file() and any(row >= step for _, row, _ in metric_rows(run)):
            time.sleep(extra)
            return True
    return False


def _saved_step(run: Path) -> int:
    from caramba.train.trainer import read_saved_step, state_path

    return read_saved_step(state_path(run, "pretrain"))


@dataclass(frozen=True)
class Campaign:
    """What the processes of a campaign share: places are folders of `root`, and none is begun after `end`."""

    seed: int
    root: Path
    home: Path
    scenarios: tuple[Scenario, ...]
    end: float

    def run_place(self, index: int, which: int | None, times: int) -> Found:
        """Send signals to one training, or kills to a scenario; return what was sent and what went wrong."""
        if time.monotonic() > self.end:
            return {}
        chance, place = random.Random(f"{self.seed}:{index}"), Place(self.root / f"place-{index}", self.home)
        try:
            if which is None:
                outcome = signal_at_random(times, place, chance)
            else:
                outcome = kill_at_random(self.scenarios[which], times, place, chance)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            return {"failed": [f"place {index}: {error}"]}
        if not any(outcome.get(key) for key in BAD):
            shutil.rmtree(place.folder)
        return outcome


def run(
    seed: int, kills: int, signals: int, only: Sequence[str], root: Path, jobs: int, seconds: float
) -> dict[str, Any]:
    """Send `kills` times SIGKILL and `signals` times another signal, in places of their own."""
    home, end = root / "home", time.monotonic() + seconds
    campaign = Campaign(seed, root, home, tuple(scenarios(root, home, only)) if kills else (), end)
    found: list[Found] = []
    sent: collections.Counter[str] = collections.Counter()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("fork")) as pool:
        for _ in range(MOST_ROUNDS):
            first = len(found)
            # Places whose commands ended before their signal came are made up for
            killed = sum(n for how, n in sent.items() if how.startswith("KILL"))
            missing = signals - (sent.total() - killed)
            planned = plan_kills(kills - killed, max(1, len(campaign.scenarios)), seed + first)
            planned += [(None, min(2, missing - at)) for at in range(0, missing, 2)]
            places = [pool.submit(campaign.run_place, first + i, *plan) for i, plan in enumerate(planned)]
            for outcome in (place.result() for place in places):
                found.append(outcome)
                sent.update(outcome.get("sent", {}))
    result: dict[str, Any] = {"seed": seed, "sent": dict(sent)}
    for key in ("late", "steps_lost", "comparisons"):
        result[key] = sum(outcome.get(key, 0) for outcome in found)
    for key in ("leftovers", "unequal", "failed"):
        result[key] = [text for outcome in found for text in outcome.get(key, ())]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="kills (default 100)")
    parser.add_argument("--signals", type=int, default=40, help="INT, HUP and TERM (default 40)")
    parser.add_argument("--only", nargs="*", choices=COMMANDS, default=(), help="commands to kill (default all)")
    parser.add_argument("--jobs", type=int, default=2, help="places at once (default 2)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no place after so many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    words = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="caramba-kill-") as name:
        options = (words.count, words.signals, words.only, Path(name), words.jobs, words.seconds)
        result = run(words.seed, *options)
    text = json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}, indent=1)
    print(text)
    if words.json is not None:
        words.json.write_text(f"{text}\n", encoding="utf-8")
    return int(any(result[key] for key in BAD))


if __name__ == "__main__":
    sys.exit(main())
