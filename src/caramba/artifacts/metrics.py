"""Every metric of a run by key: what benchmarks measured, what verification saw, and student over teacher."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from caramba.artifacts.key import MetricKey, as_word, parse_key
from caramba.errors import CarambaError
from caramba.result import WINDOW_NLL, Check, Metric, RunResult, Verdict

TEACHER, STUDENT = "teacher", "student"

# Rows of the stage table and bars of its plot, in order.
STAGES = (
    TEACHER,
    "teacher_continued",
    "student_transplant",
    "student_blockwise",
    "student_drift",
    "student_global",
    STUDENT,
)

# A count of tokens is the same for both models, and a difference may be 0: their ratios mean nothing.
NO_RATIO = frozenset({"unique_tokens", "acc_drop"})
COMPARING = frozenset(
    {"controls", "weights", "inference_ladder", "ladder", "optimizers", "generation"}
)  # families that state their ratios themselves
EXACT_16_BIT = ("fp16", "bf16")
# Fields of the family perplexity whose ratio follows from the losses of the windows.
_OF_WINDOWS = frozenset({"nll", "perplexity", "bits_per_byte"})

WindowMeans = Mapping[tuple[str, str], Sequence[float]]
"""NLL of every held-out window, in nats per token, by the benchmark's id and the model."""


@dataclass(frozen=True)
class Undefined:
    """A ratio that has no value, with the reason."""

    key: str
    reason: str


def collect(result: RunResult) -> dict[str, Metric]:
    """Return every metric of the run: measured, then `verify.*`, then `ratio.*`.

    A key that two benchmarks measure stays as it is for the first; every metric of the later one carries
    `bench=<id>`. Of several verdicts of one type the last, which is about the final student, keeps the plain
    key; the others carry `run=<run id>`.

    Raises:
        CarambaError: a key that is malformed or measured twice under one id, or a value that is not finite.
    """
    measured = _measured(result)
    ours = ratios(measured, window_means(result))[0]
    metrics = {**measured, **_verified(result.verdicts), **ours}
    for metric in metrics.values():
        if not math.isfinite(metric.value) or not math.isfinite(metric.spread or 0.0):
            raise CarambaError(
                f"metric {metric.key}: value {metric.value}, error {metric.spread} is not finite; "
                "a diverged measurement belongs in its benchmark's error"
            )
    return metrics


def find_undefined_ratios(result: RunResult) -> tuple[Undefined, ...]:
    """Return the ratios that `collect` leaves out because the teacher's value is zero."""
    return ratios(_measured(result))[1]


def _measured(result: RunResult) -> dict[str, Metric]:
    out: dict[str, Metric] = {}
    for bench in result.benchmarks:
        clash = any(out.get(metric.key, metric) != metric for metric in bench.metrics)
        for metric in bench.metrics:
            key = parse_key(metric.key)
            key = key.given(bench=as_word(bench.id)) if clash else key
            _add(out, replace(metric, key=key.format()), f"benchmark {bench.id!r}")
    return out


def _add(out: dict[str, Metric], metric: Metric, origin: str) -> None:
    if out.setdefault(metric.key, metric) != metric:
        raise CarambaError(
            f"metric {metric.key}: {origin} measured it twice ({out[metric.key].value} and {metric.value}); "
            "give the benchmarks distinct ids"
        )


def verdict_keys(verdicts: Iterable[Verdict]) -> list[list[str]]:
    """Return, for each verdict, the metric keys of its checks."""
    listed = list(verdicts)
    last = {verdict.type: index for index, verdict in enumerate(listed)}
    keys: list[list[str]] = []
    seen: dict[tuple[str, str], int] = {}
    for index, verdict in enumerate(listed):
        conditions = {} if last[verdict.type] == index else {"run": as_word(verdict.run_id)}
        if conditions:  # several checks of one type on one run are numbered in the order of the manifest
            number = seen[verdict.type, verdict.run_id] = seen.get((verdict.type, verdict.run_id), 0) + 1
            conditions |= {"check": str(number)} if number > 1 else {}
        names = [f"{as_word(verdict.type)}.{as_word(check.name)}" for check in verdict.checks]
        keys.append([MetricKey("verify", None, name, conditions).format() for name in names])
    return keys


def _verified(verdicts: tuple[Verdict, ...]) -> dict[str, Metric]:
    out: dict[str, Metric] = {}
    for verdict, keys in zip(verdicts, verdict_keys(verdicts), strict=True):
        for key, check in zip(keys, verdict.checks, strict=True):
            _add(out, _from_check(key, verdict, check), f"verdict {verdict.type!r} of run {verdict.run_id!r}")
    return out


def _from_check(key: str, verdict: Verdict, check: Check) -> Metric:
    return Metric(key, check.value, check.unit, source=f"verify:{verdict.run_id}")


def window_means(result: RunResult) -> dict[tuple[str, str], tuple[float, ...]]:
    """Return what the perplexity benchmarks kept of their windows; records of before have none."""
    found: dict[tuple[str, str], tuple[float, ...]] = {}
    for bench in (bench for bench in result.benchmarks if bench.type == "perplexity" and bench.metrics):
        for row in bench.rows:
            if row.get(WINDOW_NLL):
                found[bench.metrics[0].source, str(row["model"])] = tuple(row[WINDOW_NLL])
    return found


def ratios(
    measured: dict[str, Metric], windows: WindowMeans | None = None
) -> tuple[dict[str, Metric], tuple[Undefined, ...]]:
    """Return student over teacher for every metric that both have, and the ratios that have no value.

    The stage rows get `ratio.perplexity@model=<row>`. With errors s and t of student S and teacher T, taken
    as independent, the first-order error of the ratio is

        error(S / T) = |S / T| * sqrt((s / S)^2 + (t / T)^2)

    The losses of both on the same windows are not independent: what both find hard cancels. Where `windows` has them,
    the error is the standard error of their difference, window by window (`error_of_paired_ratio`).
    """
    by_key = {parse_key(text): metric for text, metric in measured.items()}
    out: dict[str, Metric] = {}
    undefined: list[Undefined] = []
    for key, metric in by_key.items():
        stage = key.model in STAGES and key.family == "perplexity" and key.field == "perplexity"
        if (
            key.family in COMPARING
            or key.model == TEACHER
            or key.field in NO_RATIO
            or not (key.model == STUDENT or stage)
        ):
            continue
        base = by_key.get(replace(key, model=TEACHER))
        if base is None:
            continue
        where = {} if key.model == STUDENT else {"model": str(key.model)}
        name = MetricKey("ratio", None, key.field, {**where, **key.conditions}).format()
        if base.value == 0:
            undefined.append(Undefined(name, f"{base.key} is 0"))
            continue
        ratio = _divide(name, metric, base)
        known = windows or {}
        ours, theirs = known.get((metric.source, str(key.model))), known.get((base.source, TEACHER))
        # Of one benchmark: another may have read other windows, as many.
        is_paired = metric.source == base.source and key.family == "perplexity" and key.field in _OF_WINDOWS
        if is_paired and ours and theirs:
            ratio = replace(ratio, std=None, standard_error=error_of_paired_ratio(key.field, ratio.value, ours, theirs))
        _add(out, ratio, "two families of metrics")
    return out, tuple(undefined)


def _divide(name: str, over: Metric, under: Metric) -> Metric:
    value = over.value / under.value
    spread = None
    if over.spread is not None and under.spread is not None:
        # |S/T| s/S is s/T, which also holds when S is zero.
        spread = math.hypot(over.spread / under.value, value * under.spread / under.value)
    are_errors = over.standard_error is not None and under.standard_error is not None
    source = f"{over.key} / {under.key}"
    if are_errors:
        return Metric(name, value, "ratio", source=source, standard_error=spread)
    return Metric(name, value, "ratio", std=spread, source=source)


def error_of_paired_ratio(field: str, ratio: float, ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Return the first-order standard error of student over teacher from the NLL of the same n windows.

    Of perplexity, R = exp(mean(s_i - t_i)), it is R std(s_i - t_i) / sqrt(n); of nll and of bits per byte, with
    R = mean(s_i) / mean(t_i), it is std(s_i - R t_i) / (mean(t_i) sqrt(n)). None for fewer than two windows, or where
    the two are not of the same windows.
    """
    if len(ours) != len(theirs) or len(ours) < 2:
        return None
    slope = 1.0 if field == "perplexity" else ratio
    differences = [s - slope * t for s, t in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return ratio * error if field == "perplexity" else error / statistics.fmean(theirs)


def headline(metrics: dict[str, Metric], family: str, field: str) -> dict[str, Metric]:
    """Return one metric per model for `family.*.field`, all under the same conditions, for bars and tables.

    The conditions are those that most models share; among these the longest prompt or sequence, the longest
    generation and the smallest batch. KV bytes are those of an exact 16-bit cache, or none.
    """
    groups: dict[tuple[tuple[str, int | str], ...], dict[str, Metric]] = {}
    for metric in metrics.values():
        key = parse_key(metric.key)
        if (key.family, key.field) != (family, field) or key.model is None:
            continue
        if field.startswith("kv_bytes") and key.conditions.get("kind") not in EXACT_16_BIT:
            continue
        groups.setdefault(tuple(sorted(key.conditions.items())), {})[key.model] = metric
    return max(groups.items(), key=_prominence)[1] if groups else {}


def _prominence(group: tuple[tuple[tuple[str, int | str], ...], dict[str, Metric]]) -> tuple[float, ...]:
    conditions, models = dict(group[0]), group[1]

    def number(name: str) -> float:
        value = conditions.get(name, 0)
        return float(value) if isinstance(value, int) else 0.0

    sizes = (number("prompt") + number("seq"), number("gen"), -number("batch"))
    # Metrics without `bench` come from the suite's first benchmark of their type; a cache format is the special case.
    plain = float("kind" not in conditions)
    return (len(models), plain, float("bench" not in conditions), *sizes)


def describe(conditions: dict[str, int | str]) -> str:
    """Return conditions in words: "prompt 1,024, gen 32, batch 1"; a cache format speaks for itself."""
    texts = {name: f"{value:,}" if isinstance(value, int) else value for name, value in conditions.items()}
    return ", ".join(text if name == "kind" else f"{name} {text}" for name, text in texts.items())


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
