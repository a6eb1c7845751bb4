"""What the dispersion of a metric is: a standard error of the mean, or the deviation of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable

from caramba.artifacts.key import parse_key
from caramba.result import Metric

# Fields whose `std` is a standard error in results of before, which had no `standard_error`.
_OF_MEANS = frozenset(
    {"nll", "perplexity", "bits_per_byte", "delta_nll", "ppl_ratio", "mean", "acc", "acc_norm", "exact_match"}
)
ERROR, DEVIATION = "standard error of the mean over n items", "standard deviation of n samples"


def is_standard_error(key: str) -> bool:
    """Whether the `std` of a metric of before is the standard error of its value: of losses, accuracies, ratios.

    `key` may begin with the name of a group, as in runs of several.
    """
    name = key.partition("@")[0].rpartition("/")[2]
    return name.startswith("accuracy.") or name.rpartition(".")[2] in _OF_MEANS


def has_standard_error(metric: Metric) -> bool:
    """Whether the number after a metric's plus-minus is a standard error."""
    return metric.standard_error is not None or (metric.std is not None and is_standard_error(metric.key))


def standard_error(key: str, std: float | None, n: int | None, recorded: float | None = None) -> float | None:
    """Return the standard error of a metric's value, `recorded` where it is, or None where nothing gives it."""
    if recorded is not None:
        return recorded
    if std is None or is_standard_error(key):
        return std
    return std / math.sqrt(n) if n else None


def describe_dispersion(metrics: Iterable[Metric]) -> str:
    """Return a sentence that defines ± for these metrics; empty where none has a dispersion."""
    measured = [metric for metric in metrics if metric.spread]
    kinds = {has_standard_error(metric): metric for metric in measured}
    if not kinds:
        return ""
    if len(kinds) == 1:
        return f" ± is the {ERROR if True in kinds else DEVIATION}."
    names = sorted({parse_key(metric.key).field for metric in measured if not has_standard_error(metric)})
    return f" ± is the {ERROR}; of {', '.join(names)} the {DEVIATION}."
