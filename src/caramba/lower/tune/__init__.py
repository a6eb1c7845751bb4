"""`caramba tune`: measures this machine once, for all runs on it."""

from caramba.lower.tune.attention import FAMILIES, BackendCandidate, candidates, measure_family

__all__ = ["FAMILIES", "BackendCandidate", "candidates", "measure_family"]
