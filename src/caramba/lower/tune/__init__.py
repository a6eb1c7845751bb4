"""`caramba tune`: measures this machine once, for all runs on it."""

from caramba.lower.tune.attention import FAMILIES, Candidate, candidates, measure_family

__all__ = ["FAMILIES", "Candidate", "candidates", "measure_family"]
