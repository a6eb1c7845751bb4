"""Codes and scales of the block formats in plain PyTorch, as the op `caramba::quantize` defines them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.ops.formats import nf4_levels


def split_blocks(x: Tensor, elements: int) -> Tensor:
    """Split the last axis into blocks, the last one padded with zeros. Shape: [..., W] to [..., N, elements]."""
    n_blocks = -(-x.shape[-1] // elements)
    padded = F.pad(x, (0, n_blocks * elements - x.shape[-1]))
    return padded.contiguous().view(*x.shape[:-1], n_blocks, elements)


def block_codes(blocks: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the code of each element, as an integral number, and the scale of each block.

    Shape: float32 [..., N, E] to codes [..., N, E] and scales [..., N], float16, of nf4 float32.
    """
    if kind == "nf4":
        scales = blocks.abs().amax(dim=-1)
        levels = nf4_levels(blocks.device)
        return torch.bucketize(_divide(blocks, scales), (levels[1:] + levels[:-1]) / 2), scales
    if kind == "q8_0":
        scales = (blocks.abs().amax(dim=-1) / 127).half()
        return torch.floor(_divide(blocks, scales.float()) + 0.5).clamp(-127, 127), scales
    scales = (_first_largest(blocks) / -8).half()
    return torch.floor(_divide(blocks, scales.float()) + 8.5).clamp(0, 15), scales


def round_to_blocks(x: Tensor, kind: str, elements: int) -> Tensor:
    """Return what `dequantize(*quantize(x))` gives, in the shape and dtype of x [..., W], without packed codes."""
    blocks = split_blocks(x.float(), elements)
    codes, scales = block_codes(blocks, kind)
    if kind == "nf4":
        values = nf4_levels(x.device)[codes]
    else:
        values = codes if kind == "q8_0" else codes - 8
    rounded = (values * scales.float()[..., None]).to(x.dtype)
    return rounded.flatten(-2)[..., : x.shape[-1]]


def _first_largest(blocks: Tensor) -> Tensor:
    """Return the element of largest magnitude of each block with its sign, the first one of equals.

    Sums and minima over the last axis compile into one kernel, where argmax and gather take several.
    """
    magnitudes = blocks.abs()
    at = torch.arange(blocks.shape[-1], device=blocks.device)
    peak = magnitudes.amax(dim=-1, keepdim=True)  # nan where an element is
    first = torch.where(magnitudes == peak, at, blocks.shape[-1]).amin(dim=-1, keepdim=True)
    largest = torch.where(at == first, blocks, 0).sum(dim=-1)
    return torch.where(peak.squeeze(-1).isnan(), peak.squeeze(-1), largest)


def _divide(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return x / s, 0 where s is 0 or either is not finite (the scale then makes the value not finite)."""
    safe = torch.where(scales == 0, torch.ones_like(scales), scales)
    return torch.nan_to_num(blocks / safe[..., None], nan=0.0, posinf=0.0, neginf=0.0)
