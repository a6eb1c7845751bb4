"""How tests run decode attention on a device, in the interpreter where there is none, and hold it to float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.ops.decode_cases import Case, arguments, expected

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
runs = pytest.mark.skipif(not INTERPRETED and DEVICE == "cpu", reason="runs in the interpreter's process")
needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")


def check(
    case: Case,
    dtype: torch.dtype,
    n_splits: int,
    packed_math: bool = True,
    block_tokens: int = 32,
    **reading: int,
) -> None:
    from caramba.kernels.triton.dba_decode import launch
    from caramba.kernels.triton.dba_decode_table import DecodeConfig

    args, options = arguments(case, dtype, DEVICE)
    streams = [stream for stream in args[2:5] if stream is not None]
    parts = [stream.tensors for stream in streams] + [[]] * (3 - len(streams))
    config = DecodeConfig(block_tokens=block_tokens, n_splits=n_splits, packed_math=packed_math, **reading)
    null = list(options.get("null", ()))
    kinds = [stream.kind for stream in streams]
    out, sums = launch(config, *args[:2], kinds, *parts, args[5], options.get("n_packed"), null, case.window or 0)
    wanted, wanted_sums = expected(case, args, options)
    # Exact arithmetic on the queries as given; keys and values are rounded to the queries' type, probabilities too.
    bound = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}[dtype]
    if dtype == torch.float16 and reading.get("n_heads"):
        # Values of heads together are summed by products of bfloat16. Of a latent in nf4, whose scales are float32,
        # a GPU makes levels, scales, their products, queries and weights bfloat16: each 2^-9 off, not float16's 2^-12.
        bound = 1e-2 if DEVICE == "cuda" and case.latent and "nf4" in kinds else 5e-3
    error = (out.double().cpu() - wanted).norm() / wanted.norm().clamp(min=1e-30)
    assert error < bound, f"{case}: relative error {error:.1e}"
    seen = wanted_sums.isfinite()
    assert (sums.cpu()[~seen] == -torch.inf).all()
    assert (out.cpu()[~seen] == 0).all()
    torch.testing.assert_close(sums.double().cpu()[seen], wanted_sums[seen], rtol=bound, atol=bound)


def kernel_of(case: Case, dtype: torch.dtype, **reading: int) -> str:
    return split_of(case, dtype, **reading).kernel.__name__


def split_of(case: Case, dtype: torch.dtype, **reading: int) -> Any:
    from caramba.kernels.triton.dba_decode import plan
    from caramba.kernels.triton.dba_decode_table import DecodeConfig

    args, options = arguments(case, dtype, DEVICE)
    streams = [stream for stream in args[2:5] if stream is not None]
    parts = [*(stream.tensors for stream in streams), []][:3]
    kinds = [stream.kind for stream in streams]
    made = plan(DecodeConfig(**reading), *args[:2], kinds, *parts, options["n_packed"], [], 0)
    return made.split
