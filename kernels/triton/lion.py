"""Lion over many tensors in one launch."""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import Launches
from caramba.kernels.triton.multi_tensor import BLOCK, TYPES, WARPS, are_aligned, places_of, table_of
from torch import Tensor

import triton
import triton.language as tl


@triton.jit
def _sign(x):
    """The sign of x, NaN of NaN: a weight whose gradient is no number does not stay one."""
    return tl.where(x == x, tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0), x)


@triton.jit
def _kernel(
    table_ptr,
    place_ptr,
    lr,
    beta1,
    rest1,
    beta2,
    rest2,
    decay,
    P: tl.constexpr,
    M: tl.constexpr,
    G: tl.constexpr,
    ACC: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    place = place_ptr + tl.program_id(0) * 2
    entry = table_ptr + tl.load(place) * 4
    at = tl.load(place + 1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    p_ptr = tl.load(entry).to(tl.pointer_type(P))
    m_ptr = tl.load(entry + 1).to(tl.pointer_type(M))
    g_ptr = tl.load(entry + 2).to(tl.pointer_type(G))
    if ALIGNED:
        p_ptr = tl.multiple_of(p_ptr, 16)
        m_ptr = tl.multiple_of(m_ptr, 16)
        g_ptr = tl.multiple_of(g_ptr, 16)
    size = tl.load(entry + 3)
    if ALIGNED and (tl.load(place + 1).to(tl.int64) + 1) * BLOCK_N <= size:
        p = tl.load(p_ptr + at).to(ACC)
        m = tl.load(m_ptr + at).to(ACC)
        g = tl.load(g_ptr + at).to(ACC)
        step = m * beta1 + g * rest1
        sign = _sign(step)
        tl.store(p_ptr + at, (p * decay - sign * lr).to(P))
        tl.store(m_ptr + at, (m * beta2 + g * rest2).to(M))
    else:
        mask = at < size
        p = tl.load(p_ptr + at, mask=mask, other=0.0).to(ACC)
        m = tl.load(m_ptr + at, mask=mask, other=0.0).to(ACC)
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(ACC)
        step = m * beta1 + g * rest1
        sign = _sign(step)
        tl.store(p_ptr + at, (p * decay - sign * lr).to(P), mask=mask)
        tl.store(m_ptr + at, (m * beta2 + g * rest2).to(M), mask=mask)


_launches = Launches(_kernel)


def lion_step(
    parameters: list[Tensor],
    momenta: list[Tensor],
    grads: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    groups: dict[tuple[torch.dtype, ...], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for p, m, g in zip(parameters, momenta, grads, strict=True):
        if not (p.is_contiguous() and m.is_contiguous() and g.is_contiguous()):
            raise ValueError(f"lion_step: a tensor of shape {tuple(p.shape)} is not contiguous")
        if p.numel():
            groups.setdefault((p.dtype, m.dtype, g.dtype), []).append((p, m, g))
    for dtypes, tensors in groups.items():
        rows = [(p.data_ptr(), m.data_ptr(), g.data_ptr(), p.numel()) for p, m, g in tensors]
        device = tensors[0][0].device
        table, places = table_of(rows, device), places_of([row[-1] for row in rows], device, BLOCK)
        is_aligned = are_aligned([address for row in rows for address in row[:3]])
        acc = tl.float64 if torch.float64 in dtypes else tl.float32
        key = (len(places), dtypes, is_aligned, table.get_device())
        launch = _launches.get(key)
        if launch is None:
            types = (TYPES[dtype] for dtype in dtypes)
            # Products and sums are rounded one by one, as the reference rounds them.
            options = {"num_warps": WARPS, "enable_fp_fusion": False}
            launch = _launches.add(key, (len(places),), (), *types, acc, is_aligned, BLOCK, **options)
        numbers = (lr, beta1, 1 - beta1, beta2, 1 - beta2, 1 - lr * weight_decay)
        launch(table, places, live=tuple(map(float, numbers)))
