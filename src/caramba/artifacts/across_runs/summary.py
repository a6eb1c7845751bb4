"""Means over seeds: runs that differ in nothing but a seed are repetitions of one another."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from caramba.artifacts.across_runs.gather import RunRow, is_seed, swept_keys
from caramba.errors import ConfigError, nearest

# The default metric of a table: the first of these that was measured, else the held-out loss of the last phase, else
# its training loss.
HEADLINES = ("perplexity.student.perplexity", "ratio.perplexity")
_HIGHER_IS_BETTER = (
    *("tok_s", "acc", "accuracy", "top1", "acceptance", "recall", "energy_kept", "exact_match"),
    *("win_rate", "win_tie_rate"),
)


@dataclass(frozen=True)
class MeanAndDeviation:
    """Mean and sample standard deviation of `n` runs; of one run there is no deviation."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Group:
    """Runs with the same values of the keys that the table is by."""

    values: tuple[str, ...]
    rows: tuple[RunRow, ...]

    def spread(self, metric: str) -> MeanAndDeviation | None:
        """Return mean, deviation and n of a metric over the runs that have it, or None."""
        values = [row.metrics[metric].value for row in self.rows if metric in row.metrics]
        if not values:
            return None
        return MeanAndDeviation(
            statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)
        )


def choose_keys(rows: Sequence[RunRow], asked: Sequence[str]) -> list[str]:
    """Return the keys that separate groups: those asked for, else all that differ between runs except seeds.

    Raises:
        ConfigError: a key that no run sets.
    """
    if not asked:
        return [key for key in swept_keys(rows) if not is_seed(key)]
    known = list(dict.fromkeys(key for row in rows for key in row.words))
    for key in asked:
        if key not in known:
            raise ConfigError(
                f"collect: --by {key}: no run sets it{nearest(key, known) or ';'} set: {', '.join(known) or 'nothing'}"
                "; a key of the manifests needs one value in each"
            )
    return list(asked)


def choose_metrics(rows: Sequence[RunRow], asked: Sequence[str]) -> list[str]:
    """Return the metrics of the table: those asked for, else the headline of what was measured.

    Raises:
        ConfigError: a metric that no finished run has, with the nearest one; or nothing has finished.
    """
    known = list(dict.fromkeys(key for row in rows for key in row.metrics))
    for key in asked:
        if key not in known:
            some = ", ".join(known[:12]) + (f", … ({len(known)} in all)" if len(known) > 12 else "")
            raise ConfigError(
                f"collect: --metric {key}: no finished run measured it{nearest(key, known) or ';'} "
                f"measured: {some or 'nothing yet'}"
            )
    if asked:
        return list(dict.fromkeys(asked))
    found = [key for key in HEADLINES if key in known]
    held_out = [key for key in known if key.startswith("val_loss.")]
    losses = [key for key in known if key.startswith("loss.")]
    return found[:1] or held_out[-1:] or losses[-1:]


def group_rows(rows: Iterable[RunRow], keys: Sequence[str]) -> list[Group]:
    """Group rows by their values of `keys`, in order of those values."""
    groups: dict[tuple[str, ...], list[RunRow]] = {}
    for row in rows:
        groups.setdefault(tuple(row.words.get(key, "default") for key in keys), []).append(row)
    ordered = sorted(groups.items(), key=lambda item: [_rank(value) for value in item[0]])
    return [Group(values, tuple(members)) for values, members in ordered]


def prefers_higher(metric: str) -> bool:
    """Whether more of a metric is better, by its name: throughput and accuracy; losses, bytes and times are not."""
    name = metric.partition("@")[0].rpartition("/")[2]
    return name.startswith("accuracy.") or name.rpartition(".")[2] in _HIGHER_IS_BETTER


def best_group(groups: Sequence[Group], metric: str, *, is_higher: bool) -> Group | None:
    """Return the group with the best mean of a metric; None when none has it."""
    found = [(spread.mean, group) for group in groups if (spread := group.spread(metric)) is not None]
    if not found:
        return None
    return (max if is_higher else min)(found, key=lambda item: item[0])[1]


def as_number(text: str) -> float | None:
    """Return the number that a word is, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def _rank(value: str) -> tuple[bool, float, str]:
    number = as_number(value)
    return (number is None, number if number is not None else 0.0, value)
