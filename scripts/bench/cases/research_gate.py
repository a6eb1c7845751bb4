"""Measure the gate of research loops by simulation: loops with a false win, and the power of a true improvement.

python scripts/bench/run.py research_gate --loops 10000
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from scipy.stats import beta

from caramba.config.research import GateConfig
from caramba.paper.research.gate import SHARPNESS, Pair, look

if TYPE_CHECKING:
    from record import Record

SEED = 20261126
GATE = GateConfig(metric="loss", direction="less")
DRAWS: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda chance: chance.gauss(0.0, 1.0),
    "heavy-tailed (Cauchy)": lambda chance: chance.gauss(0.0, 1.0) / (abs(chance.gauss(0.0, 1.0)) or 1.0),
    "tied (half zero, else one step)": lambda chance: chance.choice((0.0, 0.0, -1.0, 1.0)),
    "two sizes (one a hundred times the other)": lambda chance: chance.gauss(
        0.0, chance.choice((1.0, 100.0))
    ),
}


OPTIONS = "--loops=10000"


def run(options: argparse.Namespace, record: Record) -> None:
    record.start()
    record.save(**simulate(options.loops))
    for name, row in record.data["rows"].items():
        print(f"{name:<60} " + "  ".join(f"{key}={value:.4g}" for key, value in row.items()))


def simulate(loops: int) -> dict[str, Any]:
    """Return rates with their 95% bounds (Clopper-Pearson, one-sided)."""
    chance = random.Random(SEED)
    rows: dict[str, dict[str, float]] = {}
    for name, draw in DRAWS.items():
        wins = sum(
            any(run_candidate(chance, draw, 0.0)[0] for _ in range(GATE.candidates)) for _ in range(loops)
        )
        upper = float(beta.ppf(0.95, wins + 1, loops - wins)) if wins < loops else 1.0
        rows[f"no effect, {name}"] = {"loops_with_a_win": wins / loops, "upper_95": upper}
    for effect in (1.0, 2.0, 3.0):
        results = [run_candidate(chance, DRAWS["normal"], effect) for _ in range(loops)]
        wins = sum(is_accepted for is_accepted, _ in results)
        lower = float(beta.ppf(0.05, wins, loops - wins + 1)) if wins else 0.0
        rows[f"effect of {effect:g} sd of the paired differences"] = {
            "power": wins / loops,
            "lower_95": lower,
            "mean_seeds": sum(seeds for _, seeds in results) / loops,
        }
    return {
        "loops": loops,
        "seed": SEED,
        "gate": {**GATE.model_dump(mode="json"), "threshold": GATE.threshold, "sharpness": SHARPNESS},
        "rows": rows,
    }


def run_candidate(
    chance: random.Random, draw: Callable[[random.Random], float], effect: float
) -> tuple[bool, int]:
    """Return whether one candidate is accepted, and after how many seeds the test stopped."""
    pairs: list[Pair] = []
    for seed in GATE.seeds:
        pairs.append(Pair(seed, 0.0, -(effect + draw(chance))))
        seen = look(pairs, GATE)
        if seen.state != "continue":
            return seen.state == "accepted", seen.n_seeds
    return False, len(pairs)
