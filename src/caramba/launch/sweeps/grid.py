"""`--multirun`: every combination of the values given, all checked before the first runs, each a run of its own.

The points and what became of them are in the index of a sweep directory, so that the same command, or
`caramba resume SWEEP`, resumes a sweep.
"""

from __future__ import annotations

import gc
import itertools
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.errors import CarambaError, ConfigError
from caramba.launch.overrides import CommandLine, expand_sweep
from caramba.launch.run import prepare
from caramba.launch.sweeps.runner import refuse_unlike, runner_of
from caramba.runs.manifest import canonical_json, experiment_sha256
from caramba.runs.sweeps import Point, Sweep, create_sweep, find_sweep, hash_experiments

# A composition leaves cycles behind that Python would clear much later: without this, memory grows with the points.
_COLLECT_EVERY = 8


@dataclass(frozen=True)
class CheckedPoint:
    """A checked point. Its manifest is compressed, since a sweep may have thousands."""

    words: list[str]
    name: str
    experiment: str
    packed: bytes
    is_fresh: bool

    @property
    def text(self) -> str:
        return zlib.decompress(self.packed).decode()


def run_sweep(args: CommandLine) -> int:
    """Check every point, create the sweep or find the one to resume, run it, and return the exit status.

    0 when every point has finished, 1 when one has not, 130 when it was interrupted.

    Raises:
        ConfigError: a point that cannot run, two that are the same, or a sweep under torchrun; nothing is started.
    """
    refuse_ranks()
    expanded = expand_sweep(args.overrides, args.config_dirs)
    ready: list[CheckedPoint] = []
    first: Manifest | None = None
    for number, words in enumerate(expanded):
        manifest, point = check_point(words, args.config_dirs)
        first = first or manifest
        if first.launcher.is_slurm or manifest.launcher.is_slurm:
            refuse_unlike(first, manifest, " ".join(words))
        ready.append(point)
        if number % _COLLECT_EVERY == 0:
            gc.collect()
    assert first is not None
    _refuse_twins(ready)
    sweep = _find_or_create(args.overrides, ready)
    return runner_of(sweep, first, args.worker_flags).resume()


def check_point(words: list[str], config_dirs: Sequence[Path]) -> tuple[Manifest, CheckedPoint]:
    """Compose and check one point.

    Raises:
        CarambaError: what is wrong with it, naming the point.
    """
    name = " ".join(words)
    try:
        manifest, _ = prepare(words, list(config_dirs))
        if manifest.resume not in ("auto", "never"):
            raise ConfigError(f"resume={manifest.resume} names one run, and a sweep has many; leave it out")
    except CarambaError as error:
        raise type(error)(f"point {name!r} of the sweep: {error}\nnothing was started") from None
    packed = zlib.compress(canonical_json(manifest).encode())
    ready = CheckedPoint(words, manifest.name, experiment_sha256(manifest), packed, manifest.resume == "never")
    return manifest, ready


def refuse_ranks() -> None:
    """Raise when a launcher of ranks started us: every rank would run the whole sweep."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size not in ("", "1"):
        raise ConfigError(
            f"--multirun: WORLD_SIZE={size}, so each of {size} processes would run the whole sweep; start it without "
            "torchrun (launcher=process runs points side by side)"
        )


def common_name(names: Sequence[str]) -> str:
    """Return the name that all runs have, or the start that all names share."""
    if len(set(names)) == 1:
        return names[0]
    shared = itertools.takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    return "".join(letters[0] for letters in shared).rstrip("_-.") or "sweep"


def _refuse_twins(ready: list[CheckedPoint]) -> None:
    seen: dict[str, list[str]] = {}
    for point in ready:
        twin = seen.setdefault(point.experiment, point.words)
        if twin is not point.words:
            raise ConfigError(
                f"points {' '.join(twin)!r} and {' '.join(point.words)!r} of the sweep are the same experiment; "
                "remove the value that is given twice or changes nothing\nnothing was started"
            )


def find_varied(points: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return of each point the overrides that differ between points. The last override of a key counts."""
    last = [{word.lstrip("+~").partition("=")[0]: word for word in words} for words in points]
    uses = Counter(word for words in last for word in words.values())
    return [[word for word in words.values() if uses[word] < len(points)] for words in last]


def _find_or_create(overrides: list[str], ready: list[CheckedPoint]) -> Sweep:
    name = common_name([point.name for point in ready])
    experiment = hash_experiments(point.experiment for point in ready)
    found = None if any(point.is_fresh for point in ready) else find_sweep(name, experiment)
    if found is not None:
        return found
    varied = find_varied([point.words for point in ready])
    listed = (
        (Point(number, words, point.experiment), point.text)
        for number, (point, words) in enumerate(zip(ready, varied, strict=True))
    )
    return create_sweep(name, overrides, experiment, listed)
