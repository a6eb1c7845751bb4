"""`caramba tune`: measures this machine once, for all runs on it."""

from caramba.lower.tune.attention import FAMILIES as FAMILIES
from caramba.lower.tune.attention import BackendCandidate as BackendCandidate
from caramba.lower.tune.attention import candidates as candidates
from caramba.lower.tune.attention import measure_family as measure_family
