"""Means over seeds and their intervals."""

from __future__ import annotations

from collections.abc import Mapping

from record import Row

from caramba.train.orchestration.policies import compute_interval


def differences(ours: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    """Return ours minus the others', by seeds that both have."""
    return {seed: value - others[seed] for seed, value in ours.items() if seed in others}


def interval(by_seed: Mapping[int, float]) -> Row:
    """Return the mean over seeds and Student's 95% interval; one seed has none, and its ends are None."""
    found = compute_interval(list(by_seed.values()))
    has_width = len(by_seed) > 1
    ends = {"low": found.low if has_width else None, "high": found.high if has_width else None}
    return {"mean": found.mean, **ends, "seeds": len(by_seed)}
