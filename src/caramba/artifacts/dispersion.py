"""What the dispersion of a metric is: a standard error of the mean, or the deviation of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable

from caramba.artifacts.key import parse_key
from caramba.result import Metric

# Fields whose `std` is the standard error of a mean already.
_OF_MEANS = frozenset(
    {"nll", "perplexity", "bits_per_byte", "delta_nll", "ppl_ratio", "mean", "acc", "acc_norm", "exact_match"}
)
ERROR, DEVIATION = "standard error of the mean over n items", "standard deviation of n samples"


def is_standard_error(key: str) -> bool:
    """Whether the `std` of a metric is the standard error of its value: of losses, accuracies and their ratios.

    `key` may begin with the name of a group, as in runs of several.
    """
    name = key.partition("@")[0].rpartition("/")[2]
    return name.startswith("accuracy.") or name.rpartition(".")[2] in _OF_MEANS


def standard_error(key: str, std: float | None, n: int | None) -> float | None:
    """Return the standard error of a metric's value, or None where nothing gives it."""
    if std is None or is_standard_error(key):
        return std
    return std / math.sqrt(n) if n else None


def describe_dispersion(metrics: Iterable[Metric]) -> str:
    """Return a sentence that defines ± for these metrics; empty where none has a dispersion."""
    with_std = [metric for metric in metrics if metric.std]
    kinds = {is_standard_error(metric.key): metric for metric in with_std}
    if not kinds:
        return ""
    if len(kinds) == 1:
        return f" ± is the {ERROR if True in kinds else DEVIATION}."
    names = sorted({parse_key(metric.key).field for metric in with_std if not is_standard_error(metric.key)})
    return f" ± is the {ERROR}; of {', '.join(names)} the {DEVIATION}."
