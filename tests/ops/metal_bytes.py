"""What calls at the shapes of the 1B presets move at least, and what their Metal kernels move in the emulator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.ops.decode_cases import Case
from tests.ops.metal_cases import Call, decode_call, launcher

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LATENT, GEO = 2048, 32, 8, 64, 128, 256
"""Of llama32_1b and llama32_dba."""
BF16 = torch.bfloat16


def one_billion(rows: int = 512, tokens: int = 2048, batch: int = 8, width: int = WIDTH) -> Iterator[tuple[str, Call]]:
    """Yield calls by name: `rows` tokens of training, and a decode step of `batch` sequences of `tokens` each.

    Shares of what is moved are the same for another `width` of rows.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    x, residual, grad, weight = drawn(rows, width), drawn(rows, width), drawn(rows, width), drawn(width)
    stat = drawn(rows, dtype=torch.float32).abs()
    norms: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, weight, 1e-5),
        "add_rms_norm": (x, residual, weight, 1e-5),
        "rms_norm_backward": (grad, residual, x, stat, weight),
        "layer_norm": (x, weight, weight, 1e-5),
        "add_layer_norm": (x, residual, weight, weight, 1e-5),
        "layer_norm_backward": (grad, residual, x, stat, stat, weight, weight),
    }
    for op, args in norms.items():
        yield op, Call(op, BF16, args)
    table = drawn(1, rows, HEAD_DIM // 2, dtype=torch.float32)
    q = drawn(1, rows, HEADS, HEAD_DIM).transpose(1, 2)
    yield "rope", Call("rope", BF16, (q, table, table, 1.0, False, BF16))
    size = rows * width
    groups = [[drawn(size, dtype=dtype)] for dtype in (torch.float32, torch.float32, BF16)]
    yield "lion_step", Call("lion_step", torch.float32, (*groups, 1e-3, 0.9, 0.99, 0.1))
    latent = Case(("bf16", "bf16"), (tokens,) * batch, (HEADS, 1), (LATENT, GEO, LATENT), capacity=tokens)
    yield f"dba_decode, latent, batch {batch}", Call("dba_decode", BF16, decode_call(latent, BF16, 0))
    widths = (HEAD_DIM // 2, HEAD_DIM // 2, HEAD_DIM)
    heads = Case(("bf16",) * 3, (tokens,) * (batch // 4), (HEADS, KV_HEADS), widths, capacity=tokens)
    yield f"dba_decode, heads, batch {batch // 4}", Call("dba_decode", BF16, decode_call(heads, BF16, 0))


def least_bytes(call: Call, results: list[Tensor]) -> int:
    """Return the bytes of all that is read and written, each once; lion_step reads what it writes."""
    tensors = {id(x): x for x in _tensors(call.args)}
    return sum(_bytes(x) for x in (*tensors.values(), *results))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from _tensors(one)


def moved(call: Call, emulator: Any) -> tuple[int, int]:
    """Return bytes that a call moves and has to move."""
    run = launcher(call.op)
    emulator.forget_bytes()
    results = call.run(run)
    return emulator.read + emulator.written, least_bytes(call, results)
