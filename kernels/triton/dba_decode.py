"""Launcher of `caramba::dba_decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from caramba.kernels.cuda.decode import is_ready
from caramba.kernels.triton.dba_decode_modes import power_of_2
from caramba.kernels.triton.dba_decode_plan import DecodePlan, arguments, decode_shape, num_sms, plan
from caramba.kernels.triton.dba_decode_table import DecodeConfig, choose
from caramba.kernels.triton.launch import ALIGNMENT, empty, misaligned_args, stream_of
from caramba.kernels.triton.signature import LaunchCache
from torch import Tensor

Op = Callable[..., tuple[Tensor, Tensor]]
plans: LaunchCache[Any] = LaunchCache()
"""What calls of a form run: a `DecodePlan`, what another op makes of one, or an op in its place."""


def dba_decode(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
    max_seqlen: int,
    n_splits: int,
    admit: Callable[..., Op | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the op with the table's config for these shapes; `n_splits` overrides its splits.

    What is decided by the form of the arguments (how the work is cut, say) is decided once for each form. `admit` is
    called with the arguments first when their form is a new one: it refuses them, or returns what is to run in place
    of the kernel, or None. The hint of a length counts as the power of two above it, or every step would be a new form.
    """
    hint = power_of_2(max_seqlen) if max_seqlen > 0 else max_seqlen
    tensors = arguments(q_sem, q_geo, k_sem, k_geo, v, seqlens, n_packed, null)
    rest = (*kinds, len(k_sem), len(k_geo), len(v), n_packed is None, len(null), window, hint, n_splits)
    found = plans.get(rest, tensors)
    if found is None:
        given = (q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, max_seqlen, n_splits)
        found = None if admit is None else admit(*given)
        if found is None:
            found = chosen(q_sem, q_geo, kinds, k_sem, k_geo, v, n_packed, null, window, hint, n_splits)
        plans.add(rest, tensors, found)
    if not isinstance(found, DecodePlan):
        return found(
            q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null, window, max_seqlen, n_splits
        )
    return run(found, tensors)


def forget_plans() -> None:
    """Discard all plans, as after the table has changed."""
    plans.clear()


def chosen(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
    hint: int,
    n_splits: int,
) -> DecodePlan:
    """Plan calls of this signature with the table's config."""
    shape = decode_shape(q_sem, q_geo, kinds, k_sem, k_geo, v, hint)
    in_cuda = is_ready(q_sem.device) and (not v or k_sem[-1].shape[1] % 2 == 0)  # heads are read in pairs
    config = choose(shape, num_sms(q_sem.device), in_cuda)
    config = replace(config, n_splits=n_splits) if n_splits else config
    return plan(config, q_sem, q_geo, kinds, k_sem, k_geo, v, n_packed, null, window)


def launch(
    config: DecodeConfig,
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    v: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    null: list[Tensor],
    window: int,
) -> tuple[Tensor, Tensor]:
    """Run the op with one config. Only shapes decide, so the call does not synchronise with the device."""
    made = plan(config, q_sem, q_geo, kinds, k_sem, k_geo, v, n_packed, null, window)
    return run(made, arguments(q_sem, q_geo, k_sem, k_geo, v, seqlens, n_packed, null))


def run(plan: DecodePlan, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Run the op as planned for `arguments` of this form."""
    q_sem = tensors[0]
    stream = stream_of(q_sem)
    out = empty(q_sem, stream, plan.out, plan.strides, q_sem.dtype)
    sums = empty(q_sem, stream, plan.out[:-1], plan.sum_strides, torch.float32)
    if plan.is_empty:
        return out, sums
    tensors = _laid_out(plan, tensors)
    places = [x.data_ptr() for x in tensors]
    together = 0
    for place in places:
        together |= place
    # What is allocated is aligned.
    is_even = not together % ALIGNMENT
    read, ends = [places[i] for i in plan.read], (out.data_ptr(), sums.data_ptr())
    if plan.join is None:
        read += ends
        if stream is None or not plan.split.at(stream, 0 if is_even else misaligned_args(read), read):
            plan.split(*(tensors[i] for i in plan.read), out, sums)
        return out, sums
    # One for both, of which a compiled kernel needs no views.
    parts = empty(q_sem, stream, (plan.part_bytes,), (1,), torch.uint8)
    start = parts.data_ptr()
    parted = start, start + plan.sums_from
    read += parted
    if stream is None or not plan.split.at(stream, 0 if is_even else misaligned_args(read), read):
        plan.split(*(tensors[i] for i in plan.read), *_views(plan, parts, q_sem.dtype))
    joined = [*parted, *[places[i] for i in plan.joined], *ends]
    if stream is None or not plan.join.at(stream, 0 if is_even else misaligned_args(joined), joined):
        views = _views(plan, parts, q_sem.dtype)
        plan.join(*views, *(tensors[i] for i in plan.joined), out, sums)
    return out, sums


def run_splits(plan: DecodePlan, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Let every split of a plan with a join attend, as `run` does.

    Return what they attended, and the logarithms to base 2 of their sums of exponentials, fp32, each row's splits side
    by side.
    """
    tensors = _laid_out(plan, tensors)
    q_sem = tensors[0]
    parts = empty(q_sem, stream_of(q_sem), (plan.part_bytes,), (1,), torch.uint8)
    views = _views(plan, parts, q_sem.dtype)
    plan.split(*(tensors[i] for i in plan.read), *views)
    return views


def _laid_out(plan: DecodePlan, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors as a plan's kernels read them."""
    if not plan.copied:
        return tensors
    return [x.contiguous() if i in plan.copied else x for i, x in enumerate(tensors)]


def _views(plan: DecodePlan, parts: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what the splits attended and their sums, as tensors: a kernel is compiled for their dtypes."""
    return parts[: plan.sums_from].view(dtype), parts[plan.sums_from :].view(torch.float32)
