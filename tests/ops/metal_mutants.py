"""Mistakes in Metal kernels that the tests have to see: source text, and what stands there instead."""

from __future__ import annotations

from typing import NamedTuple

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"


class Mutant(NamedTuple):
    """Replace the `nth` place of `old` by `new`."""

    old: str
    new: str
    nth: int = 0

    def of(self, source: str) -> str:
        """Return the source with this mistake.

        Raises:
            ValueError: the source has no such text.
        """
        parts = source.split(self.old)
        if len(parts) < self.nth + 2:
            raise ValueError(f"no place {self.nth} of {self.old!r}")
        left, right = self.old.join(parts[: self.nth + 1]), self.old.join(parts[self.nth + 1 :])
        return left + self.new + right


_GROUP_SUM = (
    Mutant(BARRIER, "", 0),
    Mutant("partial[simdgroup] = own", "partial[simdgroup] = x"),
    Mutant("lane < simdgroups ?", "lane + 1 < simdgroups ?"),
)
_FORWARD = (
    *_GROUP_SUM,
    Mutant("row * x_stride", "row * width"),
    Mutant("row * residual_stride", "row * x_stride"),
    Mutant("i < width; i += size", "i + 1 < width; i += size", 0),
    Mutant("float(X(value + float(residual[i])))", "value"),
    Mutant("+ eps", ""),
    Mutant("start = row * width", "start = row * width + 1"),
    Mutant("if (thread_index == 0)", "if (thread_index == size)"),
    Mutant("/ float(width)", "/ float(size)"),
    Mutant(BARRIER, "", 1),
    Mutant("row < last", "row <= last"),
    Mutant("group * rows_per_group", "group * rows_per_group + 1"),
)
_BACKWARD = (
    *_GROUP_SUM,
    Mutant(BARRIER, "", 1),
    Mutant("group * rows_per_group", "group * rows_per_group + 1"),
    Mutant("row < last", "row <= last"),
    Mutant("if (has_sum) found +=", "if (has_sum) found -="),
    Mutant("sums[c] += slope * unit", "sums[c] = slope * unit"),
    Mutant("sums[c] += slope * unit", "sums[c] += inner * unit"),
    Mutant("min(long(first + rows_per_group), long(rows))", "first + rows_per_group"),
    Mutant("if (i >= width) continue;", "", 0),
    Mutant("start = row * width", "start = row * (width + 1)"),
)
MUTANTS: dict[str, tuple[Mutant, ...]] = {
    "rms_norm": _FORWARD,
    "rms_norm_backward": (*_BACKWARD, Mutant("inner - unit * mean", "inner")),
    "layer_norm": (
        *_FORWARD,
        Mutant("has_residual, i) - mean;", "has_residual, i);"),
        Mutant("- mean - rest", "- mean"),
        Mutant("if (has_bias) value = value +", "if (has_bias) value = value -"),
    ),
    "layer_norm_backward": (
        *_BACKWARD,
        Mutant("inner - slope_mean - unit", "inner - unit"),
        Mutant("bias_sums[c] += slope;", "bias_sums[c] += inner;"),
    ),
    "column_sums": (
        Mutant("i < n_shares", "i < n_shares - 1"),
        Mutant("i < n_shares", "i <= n_shares"),
        Mutant("long i = 0", "long i = 1"),
        Mutant("i * width", "i * (width + 1)"),
        Mutant("+ column]", "+ column + 1]"),
        Mutant("sums[column]", "sums[column + 1]"),
        Mutant("sum += shares", "sum = shares"),
        Mutant("float sum = 0.0f", "float sum = 1.0f"),
    ),
    "rope": (
        Mutant("first * c - second * s", "first * c + second * s"),
        Mutant("second * c + first * s", "second * c - first * s"),
        Mutant("* sign_of_sin", ""),
        Mutant("pair + half_width", "pair + half_width + 1", 0),
        Mutant("row % heads", "row / heads"),
        Mutant("place.z * table_batch", "place.z"),
        Mutant("group * table_group", "group"),
        Mutant("token * half_width", "token"),
        Mutant("token * x_token", "token * y_token"),
        Mutant("token * y_token", "token * half_width * 2"),
        Mutant("k < n_pairs", "k + 1 < n_pairs"),
        Mutant("* scale", ""),
    ),
    "lion_step": (
        Mutant("moment * beta1", "moment * beta2"),
        Mutant("slope * rest1", "slope * beta1"),
        Mutant("-1.0f : mixed", "-1.0f : 0.0f"),
        Mutant("mixed > 0.0f", "mixed >= 0.0f"),
        Mutant("weight * decay", "weight"),
        Mutant("- direction * lr", "+ direction * lr"),
        Mutant("slope * rest2", "slope * rest1"),
        Mutant("moment * beta2 +", "moment +"),
        Mutant("momentum[i] = M(", "momentum[i + 1] = M("),
        Mutant("P(weight", "P(moment"),
    ),
    "dba_decode": (
        Mutant(BARRIER, "", 0),
        Mutant(BARRIER, "", 1),
        Mutant(BARRIER, "", 2),
        Mutant(BARRIER, "", 3),
        Mutant(BARRIER, "", 4),
        Mutant("simdgroup_barrier(mem_flags::mem_threadgroup);", ""),
        Mutant("key < n_keys && feature < width", "key <= n_keys && feature < width"),
        Mutant("key < n_keys && feature < width", "key < n_keys"),
        Mutant("&& at < end &&", "&& at <= end &&"),
        Mutant("at >= end - window", "at > end - window"),
        Mutant("sum[row * COLUMNS + c] *= shrink[row];", ""),
        Mutant("total[row] * factor", "total[row]"),
        Mutant("key * key_stride", "key * width"),
        Mutant("(tile + key) * v_token", "(tile + key) * v_width"),
        Mutant("head * v_head", "head * sem_head"),
        Mutant("has_null && split == 0", "has_null"),
        Mutant("min(long(first + share), length)", "first + share"),
        Mutant("key < n_keys; ++key", "key < KEYS; ++key"),
        Mutant("(first_row + row) % queries", "(first_row + row) / queries"),
        Mutant("length - queries + 1 - window", "length - window"),
        Mutant("min(long(seqlens[batch]), long(n_stored))", "long(n_stored)"),
    ),
    "dba_decode_merge": (
        Mutant("i < n_splits", "i + 1 < n_splits", 1),
        Mutant("i < n_splits", "i + 1 < n_splits", 2),
        Mutant("exp(top - best)", "1.0f", 0),
        Mutant("exp(top - best)", "1.0f", 1),
        Mutant("stride = v_width + 2", "stride = v_width + 1"),
        Mutant("row * n_splits * stride", "row * stride"),
        Mutant("best + log(total)", "log(total)"),
        Mutant("sum / total", "sum"),
        Mutant("sums[row] = ", "sums[row + 1] = "),
        Mutant("d < v_width; d += size", "d < v_width - 1; d += size"),
    ),
}
"""By kernel: `column_sums` runs after a backward, `dba_decode_merge` after splits."""
