"""Launches of the CUDA kernels of `caramba::dba_decode`, for the calls that they can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import caramba.kernels.cuda.heads as heads
import caramba.kernels.cuda.latent as latent
import caramba.kernels.cuda.launch_configs as launch_configs
import caramba.kernels.cuda.nvrtc as nvrtc
import torch
from caramba.kernels.cuda.blocks import ZEROS
from caramba.kernels.cuda.launch import CudaLaunch
from caramba.kernels.triton.launch import INTERPRETED
from torch import Tensor

if TYPE_CHECKING:
    from caramba.kernels.triton.dba_decode_table import DecodeConfig
    from caramba.kernels.triton.launch import Launch

CHUNK = 16
"""Bytes of a copy to shared memory, and the alignment of its source."""
N_TENSORS = 15
LARGEST = 2**31 - 1


def split_launch(
    config: DecodeConfig,
    kinds: Sequence[str],
    queries: Sequence[Tensor],
    streams: Sequence[Sequence[Tensor]],
    scalars: Sequence[int],
    *,
    has_window: bool,
    final: bool,
    announced: bool,
    early: bool,
    otherwise: Launch,
) -> CudaLaunch | None:
    """Return the CUDA launch of a call's splits, or None for unsupported shapes or without a compiler.

    It replaces `otherwise`, a launch of Triton's kernels on the same tensors with the same outputs.
    """
    q_sem, q_geo = queries
    batch, n_heads, n_queries, _ = q_sem.shape
    kv_heads = streams[0][-1].shape[1]
    group = n_heads // kv_heads
    dims = q_sem.shape[-1], q_geo.shape[-1], streams[-1][-1].shape[-1]
    blocks = [parts for parts, kind in zip(streams, kinds, strict=True) if kind != ZEROS]
    if not (
        is_ready(q_sem.device)
        and q_sem.dtype in (torch.float16, torch.bfloat16)
        and launch_configs.can_read(config, kinds, dims, kv_heads, group * n_queries)
        and all(_lies_in_chunks(parts) for parts in blocks)
        and all(_steps(q, 3, CHUNK // 2) for q in queries)
        and all(abs(x) <= LARGEST for x in scalars)
    ):
        return None
    tails = {parts[2].dtype for parts in blocks}
    form = {
        "group": group,
        "queries": n_queries,
        "has_window": has_window,
        "final": final,
        "in_bf16": q_sem.dtype == torch.bfloat16,
    }
    if len(kinds) == 2:
        way = launch_configs.latent_config(config)
        way = replace(way, grouped=way.grouped and is_hopper(q_sem.device))
        if tails != {torch.bfloat16}:
            return None
        macros = latent.macros(kinds, dims[:2], way, **form, announced=announced)
        shared = latent.shared_bytes(kinds, dims[:2], way)
        features = "a" if way.grouped else ""
        name, programs, threads = "decode_latent", -(-group * n_queries // way.rows), 32 * way.warps
    else:
        own = launch_configs.heads_config(config)
        if len(tails) != 1:
            return None
        macros = heads.macros(
            kinds, dims, own, **form, kv_heads=kv_heads, announced=announced, tail_in_bf16=tails == {torch.bfloat16}
        )  # fmt: skip
        shared = heads.shared_bytes(kinds, dims, group * n_queries, own)
        features = ""
        name, programs, threads = "decode_heads", kv_heads // 2, 32 * own.warps
    if shared > most_shared(q_sem.device):
        return None
    grid = batch * programs, config.n_splits
    return CudaLaunch(f"{name}.cu", name, macros, grid, threads, shared, N_TENSORS, scalars, otherwise, features, early)


def is_ready(device: torch.device) -> bool:
    """Whether kernels can be compiled for a device, and it has the instructions that all of them use."""
    if device.type != "cuda" or INTERPRETED:
        return False
    return nvrtc.version() is not None and torch.cuda.get_device_capability(device) >= (8, 0)


def most_shared(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def is_hopper(device: torch.device) -> bool:
    """Whether a device has the products of four warps, which its successors have not."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def _lies_in_chunks(parts: Sequence[Tensor]) -> bool:
    """Whether a stream is blocks behind a 16-bit tail, whose tokens' codes and eight tokens' scales are chunks.

    Where the tensors begin is seen when they are launched on.
    """
    if len(parts) != 3:
        return False
    codes, scales, tail = parts
    many = CHUNK // scales.element_size()
    return (
        codes.stride(-1) == 1
        and codes.stride(2) == codes.shape[3]
        and _steps(codes, 2, CHUNK)
        and scales.stride(2) == 1
        and _steps(scales, 2, many)
        and scales.shape[2] % many == 0  # one row alone has no stride, and is read by whole chunks too
        and tail.dtype in (torch.float16, torch.bfloat16)
        and tail.stride(-1) == 1
        and _steps(tail, 3, CHUNK // 2)
    )


def _steps(x: Tensor, n_dims: int, by: int) -> bool:
    """Whether the first dimensions that have more than one place go by multiples of a number."""
    return all(s % by == 0 for s, n in zip(x.stride()[:n_dims], x.shape, strict=False) if n > 1)
