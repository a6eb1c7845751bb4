"""The shared memory of a config of decode attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import caramba.kernels.cuda.blocks as blocks
import caramba.kernels.cuda.launch_configs as cuda

if TYPE_CHECKING:
    from caramba.kernels.triton.dba_decode_table import DecodeConfig, DecodeShape

SHARED_BYTES = blocks.MOST_SHARED
SM_BYTES = 228 * 1024
"""Shared memory of a multiprocessor of Hopper, of which each block takes 1 KB more than it asks for."""
LEEWAY = 1024  # bytes that a kernel may take beyond what is counted
NUMBER_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, blocks.ZEROS: 2}
BLOCKS = {
    kind: (elements, codes / elements, scale) for kind, (elements, codes, scale) in blocks.BLOCKS.items()
}
"""Elements of a block, bytes of a code and of a scale."""
TOGETHER_ROWS = 16
"""Rows of a product, which heads that are read together fill."""
GROUP_ROWS = 64
"""Rows of a product of a warp group."""


def is_in_fp32(shape: DecodeShape) -> bool:
    """Whether a tile holds numbers of float32, which takes twice the shared memory."""
    return shape.in_fp32 or "fp32" in shape.formats


def shared_bytes(shape: DecodeShape, reading: DecodeConfig) -> int:
    """Return the shared memory of a program on Hopper, as compiled kernels have it.

    It holds queries, stages of what is stored, one fewer than are in flight, and a tile of what products cannot read as
    it is stored. Products of a warp group's rows read numbers where they are loaded, so that all stages stay; those of
    fewer rows hold scores. Of heads read together codes go to products as they are stored.
    """
    if reading.in_cuda:
        return cuda.shared_bytes(reading, shape.formats, shape.dims, shape.rows)
    if reading.n_heads and len(shape.formats) == 2:
        stored = sum(
            _loaded_bytes(kind, width) * width for kind, width in zip(shape.formats, shape.dims, strict=False)
        )
        elements, _, scale = BLOCKS[shape.formats[0]]
        stored += (
            shape.dims[0] / elements * scale
        )  # the latent's scales are read by words of keys, and of values
        numbers = 2 * (reading.block_rows * sum(shape.dims[:2]) + TOGETHER_ROWS * reading.block_tokens)
        return numbers + int((reading.n_stages - 1) * reading.block_tokens * stored)
    if reading.n_heads:
        numbers = reading.block_rows * (reading.n_heads * sum(shape.dims[:2]) + reading.block_tokens) * 2
        stored = 0.0
        for kind, width in zip(shape.formats, shape.dims, strict=True):
            elements, code, scale = BLOCKS[kind]
            stored += reading.n_heads * (width * code + max(1, width // elements) * scale)
        return numbers + int((reading.n_stages - 1) * reading.block_tokens * stored)
    widths = [max(16, next_power_of_2(width)) for width in shape.dims]
    itemsize = 4 if is_in_fp32(shape) else 2
    is_grouped = reading.block_rows >= GROUP_ROWS
    total = reading.block_rows * sum(widths[:2]) * itemsize
    if not is_grouped:
        total += reading.block_rows * reading.block_tokens * itemsize
    for kind, width, padded in zip(shape.formats, shape.dims, widths, strict=False):
        tile, stored = reading.block_tokens * padded, _loaded_bytes(kind, width)
        is_read = stored == itemsize
        total += int((reading.n_stages - (not (is_grouped and is_read))) * tile * stored)
        total += 0 if is_read else tile * itemsize
    return total


def _loaded_bytes(kind: str, width: int) -> float:
    """Return the bytes that are loaded of an element of a head, with its share of a scale."""
    if kind in NUMBER_BYTES:
        return NUMBER_BYTES[kind]
    elements, code, scale = BLOCKS[kind]
    if width % elements == 0:
        return code + scale / elements
    # A byte of codes is loaded for each code in it, and where heads cross blocks each has its own scale.
    return 1 + (scale / width if elements % width == 0 else scale)


def next_power_of_2(n: int) -> int:
    """Return the power of two from n on."""
    return 1 << max(0, n - 1).bit_length()
