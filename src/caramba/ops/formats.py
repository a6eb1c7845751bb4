"""Storage formats of caches by name; blocks of q8_0, q4_0 and nf4; the ops that pack and unpack them; Hadamard."""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.config.kvcache import BLOCKS, BlockFormat, KVCacheKind
from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op

# Quantiles of the normal distribution scaled to [-1, 1], zero among them: bin centres of equal probability mass
# (Dettmers et al., 2023, arXiv:2305.14314, appendix E).
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


@functools.cache
def nf4_levels(device: torch.device) -> Tensor:
    """Return the levels, float32 [16], made once for a device: nothing is copied there as a graph is captured."""
    return torch.tensor(NF4_LEVELS, device=device)


@dataclass(frozen=True)
class StoredFormat:
    """Element types of a block format's two arrays, codes [..., N, code_width] and scales [..., N] for N blocks.

    A 4-bit block of E elements has byte j hold element j in its low and element j + E/2 in its high nibble.
    """

    kind: KVCacheKind
    block: BlockFormat
    code_dtype: torch.dtype
    scale_dtype: torch.dtype

    @property
    def code_width(self) -> int:
        """Codes per block as array elements, each of one byte."""
        return self.block.code_bytes


STORED = {
    KVCacheKind.Q8_0: StoredFormat(KVCacheKind.Q8_0, BLOCKS[KVCacheKind.Q8_0], torch.int8, torch.float16),
    KVCacheKind.Q4_0: StoredFormat(KVCacheKind.Q4_0, BLOCKS[KVCacheKind.Q4_0], torch.uint8, torch.float16),
    KVCacheKind.NF4: StoredFormat(KVCacheKind.NF4, BLOCKS[KVCacheKind.NF4], torch.uint8, torch.float32),
}


def get_block_format(kind: str) -> StoredFormat:
    """Return the format of a quantised kind.

    Raises:
        ConfigError: `kind` is not one.
    """
    for known, stored in STORED.items():
        if kind == known:
            return stored
    raise ConfigError(f"quantise: kind={kind} is not a block format; use one of: {', '.join(STORED)}")


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes 0..15 [..., E] into bytes [..., E/2]: the first half of a block low, the second high."""
    low, high = codes.to(torch.uint8).chunk(2, dim=-1)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Undo `pack_nibbles`: uint8 [..., E/2] to uint8 [..., E]."""
    return torch.cat((packed & 0x0F, packed >> 4), dim=-1)


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


def hadamard(x: Tensor) -> Tensor:
    """Multiply the last axis by the orthonormal Walsh-Hadamard matrix H, in at least float32.

    H is symmetric, so it is its own inverse, and (q H) . (k H) = q . k: scores do not change when queries and keys
    both rotate, after RoPE as well. A width W that is no power of two is rotated in pieces of the largest power of
    two that divides it; an odd one stays as it is.

    Shape: [..., W] to [..., W].

    Reference: Ashkboos et al., 2024, arXiv:2404.00456 (rotation before 4-bit caches).
    """
    width = x.shape[-1]
    piece, step = width & -width, 1
    rows = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, max(piece, 1)))
    while step < piece:
        first, second = rows.unflatten(-1, (-1, 2, step)).unbind(-2)
        rows = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        step *= 2
    return rows.flatten(-2) * max(piece, 1) ** -0.5


def quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Quantise the last axis in blocks, the last block padded with zeros.

    With m the element of largest magnitude of a block, s its scale, both formulas rounding half up:

        q8_0: s = |m| / 127, code = clamp(round(x / s), -127, 127)
        q4_0: s = m / -8,    code = clamp(round(x / s) + 8, 0, 15)
        nf4:  s = |m|,       code = index of the NormalFloat level nearest to x / s

    s is rounded to its stored type (fp16, for nf4 fp32) before it divides. The error of an element is at most
    |s|/2 for q8_0, |s| for q4_0 (half of it on the side of m), 0.152 s for nf4, plus what fp16 loses below 2^-14
    of s. A block that holds something not finite, or a scale above 65504, comes back as not finite, never as a
    wrong number.

    Shape: x [..., W] of any floating dtype to codes [..., N, code_width] (int8, or uint8 for 4 bits) and scales
    [..., N], with N = ceil(W / block).

    Raises:
        ConfigError: a kind that is not a block format, or x that is not floating point.

    Reference: Gerganov et al., ggml (q8_0, q4_0: same blocks and levels; ours divide by the rounded scale);
    Dettmers et al., 2023, arXiv:2305.14314 (NormalFloat).
    """
    _checked(x, kind)
    return call_op("quantize", x, str(kind))


def _fake(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    stored = _checked(x, kind)
    shape = (*x.shape[:-1], -(-x.shape[-1] // stored.block.elements))
    return (
        x.new_empty((*shape, stored.code_width), dtype=stored.code_dtype),
        x.new_empty(shape, dtype=stored.scale_dtype),
    )


@caramba_op("quantize", fake=_fake)
def reference_quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Compute `quantize` in plain PyTorch, in float32."""
    stored = _checked(x, kind)
    elements = stored.block.elements
    codes, scales = block_codes(split_blocks(x.float(), elements), stored.kind)
    return codes.to(torch.int8) if stored.kind is KVCacheKind.Q8_0 else pack_nibbles(codes), scales


def _checked(x: Tensor, kind: str) -> StoredFormat:
    stored = get_block_format(kind)
    if not x.is_floating_point() or x.dim() < 1:
        raise ConfigError(
            f"quantise: x is {x.dtype} of shape {tuple(x.shape)}, expected a floating dtype and one axis at least"
        )
    return stored


def dequantize(codes: Tensor, scales: Tensor, kind: str, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the numbers that codes stand for: s * code, s * (code - 8), or s * level[code], rounded to `dtype` once.

    Shape: codes [..., N, code_width] and scales [..., N] to [..., width], with N = ceil(width / block); what pads
    the last block is dropped.

    Raises:
        ConfigError: a kind that is not a block format, codes and scales that are not of that kind and width, or
            numbers of a dtype that is not floating.
    """
    _check(codes, scales, kind, width)
    if not dtype.is_floating_point:
        raise ConfigError(f"dequantise: dtype is {dtype}, expected a floating one")
    return call_op("dequantize", codes, scales, str(kind), width, dtype)


def _fake_dequantize(codes: Tensor, scales: Tensor, kind: str, width: int, dtype: torch.dtype) -> Tensor:
    _check(codes, scales, kind, width)
    return codes.new_empty((*codes.shape[:-2], width), dtype=dtype)


@caramba_op("dequantize", fake=_fake_dequantize)
def reference_dequantize(codes: Tensor, scales: Tensor, kind: str, width: int, dtype: torch.dtype) -> Tensor:
    """Compute `dequantize` in plain PyTorch, in float32."""
    _check(codes, scales, kind, width)
    if kind == KVCacheKind.Q8_0:
        values = codes.float()
    elif kind == KVCacheKind.Q4_0:
        values = unpack_nibbles(codes).float() - 8
    else:
        values = nf4_levels(codes.device)[unpack_nibbles(codes).int()]
    rows = (values * scales.float()[..., None]).to(dtype).flatten(-2)
    return rows[..., :width].contiguous()


def _check(codes: Tensor, scales: Tensor, kind: str, width: int) -> None:
    stored = get_block_format(kind)
    n_blocks = stored.block.n_blocks(width)
    expected = (*scales.shape[:-1], n_blocks, stored.code_width)
    if tuple(codes.shape) != expected or scales.shape[-1:] != (n_blocks,):
        raise ConfigError(
            f"dequantise: codes {tuple(codes.shape)} and scales {tuple(scales.shape)} do not hold {width} elements "
            f"of {kind}; expected codes [..., {n_blocks}, {stored.code_width}] and scales [..., {n_blocks}]"
        )
    wrong = (codes.dtype, scales.dtype) != (stored.code_dtype, stored.scale_dtype)
    if wrong or codes.device != scales.device:
        raise ConfigError(
            f"dequantise: codes are {codes.dtype} on {codes.device} and scales {scales.dtype} on {scales.device}, "
            f"{kind} has {stored.code_dtype} and {stored.scale_dtype} on one device; pass what quantize returned"
        )
