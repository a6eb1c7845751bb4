"""Mutate manifests of conf and check that `compile` accepts each or refuses it as a user's mistake.

A case is one manifest after one to four mutations: a composed experiment as a single file, or an option of a group in a
folder of its own. Each runs what `caramba compile` runs, under limits of CPU time and memory, in forked processes.

Usage: python scripts/faults/mutate.py [--seed 1] [--count 10000] [--jobs 2] [--first 0] [--json FILE]

It prints one JSON object and ends with status 1 when a case did neither, took too long or too much memory, or was
refused in a message that is long or has control characters. `--first N --count 1` repeats case N.
"""

from __future__ import annotations

import collections
import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from case_pool import Run, limit_memory, outcomes, parser
from case_pool import main as report
from manifest_mutations import Case, make_case, originals

CPU_S, MEMORY_BYTES, LONGEST_MESSAGE, STUCK_S = 2.0, 500 << 20, 2000, 60.0


class TooSlow(BaseException):
    """A case used its CPU time; not an error, so that nothing handles it."""


@dataclass
class Result:
    """What the cases did; `faults` lists the first of every kind in full."""

    accepted: int = 0
    refused: int = 0
    unnamed: int = 0
    named: int = 0
    longest_cpu_s: float = 0.0
    longest_message: int = 0
    kinds: collections.Counter[str] = field(default_factory=collections.Counter)
    faults: list[dict[str, Any]] = field(default_factory=list)
    unnamed_examples: list[dict[str, Any]] = field(default_factory=list)

    def add(self, index: int, found: dict[str, Any]) -> None:
        self.longest_cpu_s = max(self.longest_cpu_s, found.get("cpu_s", 0.0))
        self.kinds.update(found.get("kinds", ()))
        message = found.get("message", "")
        if found["fault"]:
            self.faults.append({"case": index, **found})
        elif found["outcome"] == "accepted":
            self.accepted += 1
        else:
            self.refused += 1
            self.longest_message = max(self.longest_message, len(message))
        if found.get("names_key") is not None:
            self.named += found["names_key"]
            self.unnamed += not found["names_key"]
            if not found["names_key"] and len(self.unnamed_examples) < 40:
                self.unnamed_examples.append({"case": index, "key": found["key"], "message": message[:300]})

    def as_json(self) -> dict[str, Any]:
        return {
            "count": self.accepted + self.refused + len(self.faults),
            "accepted": self.accepted,
            "refused": self.refused,
            "n_faults": len(self.faults),
            "fault_kinds": dict(collections.Counter(str(fault["fault"]) for fault in self.faults)),
            "refusals_that_name_the_key": self.named,
            "refusals_that_do_not": self.unnamed,
            "longest_cpu_s": round(self.longest_cpu_s, 3),
            "longest_message": self.longest_message,
            "mutations": dict(sorted(self.kinds.items())),
            "faults": self.faults[:40],
            "unnamed": self.unnamed_examples,
        }


def compile_case(case: Case, folder: Path) -> None:
    """Do what `caramba compile` does with a manifest alone: no data, weights or environment are looked at."""
    compile_manifest(*case.write(folder))


def compile_manifest(overrides: Sequence[str], folders: Sequence[Path] = ()) -> None:
    from caramba.config.estimate import as_json, plan, render_text
    from caramba.launch.freeze import freeze

    frozen = freeze(overrides, folders)
    frozen.refuse_unbuilt()
    experiment = plan(frozen.manifest, command="x", fit=frozen.fit)
    render_text(experiment)
    json.dumps(as_json(experiment), allow_nan=False)


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Return what a case did, and which fault that is, None for none."""
    from caramba.errors import CarambaError

    began, fault, outcome, message = time.process_time(), None, "accepted", ""
    signal.setitimer(signal.ITIMER_PROF, 2 * CPU_S)
    try:
        compile_case(case, folder)
    except CarambaError as error:
        outcome, message = type(error).__name__, str(error)
        if error.exit_status != 2:
            fault = f"exit status {error.exit_status}: {outcome}"
        elif len(message) > LONGEST_MESSAGE:
            fault = "long message"
        elif not message.replace("\n", "").replace("\t", "").isprintable():
            fault = "control characters"
    except TooSlow:
        fault = "slow"
        message = traceback.format_exc()[-1500:]
    except MemoryError:
        fault, message = "memory", traceback.format_exc()[-1500:]
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{type(error).__name__} at {Path(place.filename).name}:{place.name}"
        message = traceback.format_exc()[-1500:]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    cpu_s = time.process_time() - began
    if fault is None and cpu_s > CPU_S:
        fault = "slow"
    names_key = None
    if fault is None and outcome != "accepted" and case.key is not None:
        names_key = case.key in message
    return {
        "outcome": outcome,
        "fault": fault,
        "message": message if fault or names_key is False else message[:LONGEST_MESSAGE],
        "cpu_s": cpu_s,
        "kinds": case.kinds,
        "key": case.key,
        "names_key": names_key,
    }


def _raise_slow(number: int, frame: Any) -> None:
    raise TooSlow


def mutate(seed: int, first: int, count: int, jobs: int = 1, seconds: float | None = None) -> Result:
    """Run `count` cases from number `first` on, and return what they did."""
    result, sources = Result(), originals()
    compile_manifest(["model=tiny", "train=pretrain"])  # no case is charged with imports

    def prepare(folder: Path) -> Run:
        signal.signal(signal.SIGPROF, _raise_slow)
        gc.freeze()  # a collection would copy the pages of everything that the parent holds
        limit_memory(MEMORY_BYTES)
        return lambda index: run_case(make_case(sources, seed, index), folder)

    for index, found in outcomes(prepare, first, count, jobs, stuck_s=STUCK_S, seconds=seconds):
        result.add(index, found)
    return result


def main() -> int:
    described = parser(__doc__, count=10_000, cases="mutated manifests")
    described.add_argument("--first", type=int, default=0, help="number of the first case")
    words = described.parse_args()

    def run() -> dict[str, Any]:
        result = mutate(words.seed, words.first, words.count, words.jobs, words.seconds)
        return {"seed": words.seed, **result.as_json()}

    return report(words, run, "n_faults")


if __name__ == "__main__":
    sys.exit(main())
