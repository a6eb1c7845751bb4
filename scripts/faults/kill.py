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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from caramba.runs.events import metric_rows, read_events
from caramba.runs.files import is_locked

sys.path.insert(0, str(Path(__file__).parent))

from case_pool import POOL, TINY, Found, main, outcomes

LIMIT_S, STUCK_S = 300.0, 1800.0
MOST_LATE, MOST_ROUNDS = 10, 5
BAD = ("leftovers", "unequal", "failed", "steps_lost")
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
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
            )

    def finish(self, words: Sequence[str]) -> float:
        """Run a command to its end and return its seconds."""
        began = time.monotonic()
        status = self.start(words).wait(LIMIT_S)
        if status != 0:
            text = self.folder.with_suffix(".log").read_text(errors="replace")
            raise RuntimeError(
                f"caramba {' '.join(words)} in {self.folder}: exit status {status}\n{text[-3000:]}"
            )
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
    corpus.write_text(
        "".join(f"line {number}: {number * number} of a text to prepare\n" for number in range(20000))
    )
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
    if unknown := set(only) - commands.keys():
        raise SystemExit(f"--only {' '.join(unknown)}: expected some of {', '.join(commands)}")
    for name in only or commands:
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


def run(
    seed: int, kills: int, signals: int, only: Sequence[str], root: Path, jobs: int, seconds: float
) -> dict[str, Any]:
    """Send `kills` times SIGKILL and `signals` times another signal, in places of their own."""
    home, began = root / "home", time.monotonic()
    made = list(scenarios(root, home, only)) if kills else []
    found: list[Found] = []
    sent: collections.Counter[str] = collections.Counter()
    planned: list[tuple[int | None, int]] = []

    def prepare(_: Path) -> Callable[[int], Found]:
        def case(index: int) -> Found:
            chance = random.Random(f"{seed}:{index}")
            place = Place(root / f"place-{index}", home)
            which, times = planned[index - first]
            if which is None:
                outcome = signal_at_random(times, place, chance)
            else:
                outcome = kill_at_random(made[which], times, place, chance)
            if not any(outcome.get(key) for key in BAD):
                shutil.rmtree(place.folder)
            return outcome

        return case

    for _ in range(MOST_ROUNDS):
        first = len(found)
        # Places whose commands ended before their signal came are made up for
        killed = sum(n for how, n in sent.items() if how.startswith("KILL"))
        missing = signals - (sent.total() - killed)
        planned = plan_kills(kills - killed, max(1, len(made)), seed + first)
        planned += [(None, min(2, missing - at)) for at in range(0, missing, 2)]
        keys: dict[str, Any] = {
            "first": first,
            "batch": 1,
            "stuck_s": STUCK_S,
            "seconds": began + seconds - time.monotonic(),
        }
        for _, outcome in outcomes(prepare, len(planned), jobs, **keys):
            found.append(outcome)
            sent.update(outcome.get("sent", {}))
        if not planned:
            break
    result: dict[str, Any] = {"seed": seed, "sent": dict(sent)}
    for key in ("late", "steps_lost", "comparisons"):
        result[key] = sum(outcome.get(key, 0) for outcome in found)
    for key in ("leftovers", "unequal", "failed"):
        result[key] = [text for outcome in found for text in outcome.get(key, ())]
    result["failed"] += [outcome["fault"] for outcome in found if "fault" in outcome]
    return result


def campaign(words: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="caramba-kill-") as name:
        options = (words.count, words.signals, words.only, Path(name), words.jobs, words.seconds)
        return run(words.seed, *options)


if __name__ == "__main__":
    options = (*POOL, ("--count", 100), ("--signals", 40), ("--only", ()))
    sys.exit(main(__doc__, campaign, options, *BAD))
