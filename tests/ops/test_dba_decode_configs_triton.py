"""Ways to read quantised streams: heads together, latents by words, kernels in CUDA C++, against float64.

On a CPU `test_in_the_interpreter.py` runs this file.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.decode_cases import Case, arguments, expected
from tests.ops.decode_runs import DEVICE, DTYPES, check, kernel_of, needs_gpu, runs, split_of

TOGETHER = {
    "mixed, a head of a block and half a head": (
        Case(("q4_0", "q8_0", "q4_0"), (90, 0), heads=(8, 4), packed=80),
        {"n_heads": 4},
    ),
    "nf4, questions, window, null": (
        Case(("nf4",) * 3, (105,), heads=(4, 4), queries=3, packed=80, tail=48, window=50, null=True),
        {"n_heads": 4},
    ),
    "heads of three blocks, more than one program": (
        Case(("q8_0",) * 3, (70,), heads=(8, 4), dims=(32, 64, 96), packed=48),
        {"n_heads": 2},
    ),
    "fewer together than the choice says": (
        Case(("q4_0", "nf4", "q4_0"), (75,), heads=(6, 2), dims=(64, 128, 64), packed=48),
        {"n_heads": 16, "block_rows": 32},
    ),
}


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TOGETHER)
def test_heads_are_read_together(name: str, dtype: torch.dtype) -> None:
    case, reading = TOGETHER[name]
    if DEVICE == "cpu" and dtype == torch.float16 and not name.startswith("mixed"):
        pytest.skip("the interpreter takes seconds")
    on_plain = dtype == torch.float32 and DEVICE == "cuda"
    assert kernel_of(case, dtype, **reading) == ("split_kv_kernel" if on_plain else "decode_heads")
    check(case, dtype, 2, **reading)


LATENTS = {
    "mixed": (Case(("q4_0", "q8_0"), (90, 70), heads=(8, 1), dims=(128, 64, 128), packed=64), {}),
    "nf4, questions, window, null, two programs of rows": (
        Case(
            ("nf4", "nf4"),
            (105,),
            heads=(6, 1),
            dims=(64, 128, 64),
            queries=3,
            packed=80,
            tail=48,
            window=50,
            null=True,
        ),
        {},
    ),
    "q8_0 and q4_0, two tiles of rows": (
        Case(("q8_0", "q4_0"), (75, 0), heads=(20, 1), dims=(64, 64, 64), packed=48),
        {"block_rows": 32},
    ),
}


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LATENTS)
def test_a_latent_is_read_by_words(name: str, dtype: torch.dtype) -> None:
    case, reading = LATENTS[name]
    if DEVICE == "cpu" and dtype == torch.float16 and name != "mixed":
        pytest.skip("the interpreter takes seconds")
    on_plain = dtype == torch.float32 and DEVICE == "cuda"
    assert kernel_of(case, dtype, n_heads=1, **reading) == ("split_kv_kernel" if on_plain else "decode_latent")
    check(case, dtype, 2, n_heads=1, **reading)


IN_CUDA = {
    "heads, mixed": (
        Case(("q4_0", "q8_0", "q4_0"), (171, 0, 1, 90), heads=(8, 2), packed=101),
        {"block_rows": 8, "n_heads": 2},
    ),
    "heads, nf4, questions, window, null": (
        Case(("nf4",) * 3, (150,), heads=(4, 4), queries=3, packed=128, window=70, null=True),
        {"block_rows": 8, "n_heads": 2},
    ),
    "a latent, mixed": (
        Case(("q4_0", "q8_0"), (149, 60), heads=(32, 1), dims=(128, 64, 128), packed=128),
        {"block_rows": 32, "n_heads": 1},
    ),
    "a latent, questions, window, null": (
        Case(
            ("q8_0", "q4_0"),
            (149,),
            heads=(8, 1),
            dims=(128, 256, 128),
            queries=3,
            packed=100,
            window=70,
            null=True,
        ),
        {"block_rows": 32, "n_heads": 1},
    ),
}


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IN_CUDA)
def test_a_way_in_cuda_is_taken_or_what_is_in_its_place(name: str, dtype: torch.dtype) -> None:
    case, reading = IN_CUDA[name]
    if DEVICE == "cpu":
        if dtype == torch.float16 or "questions" in name:
            pytest.skip("the interpreter takes seconds")
        case = replace(case, lengths=(43, 0), packed=36, heads=(8, case.heads[1]))
    reading = {**reading, "block_tokens": 32, "n_warps": 4, "n_stages": 2, "in_cuda": 1}
    if DEVICE == "cuda":
        assert type(split_of(case, dtype, **reading)).__name__ == ("Launch" if dtype == torch.float32 else "CudaLaunch")
    for n_splits in (1, 3) if DEVICE == "cuda" else (2,):
        check(case, dtype, n_splits, **reading)


@pytest.mark.gpu
@needs_gpu
def test_what_begins_beside_a_chunk_goes_to_triton() -> None:
    from caramba.kernels.triton.dba_decode import launch
    from caramba.kernels.triton.dba_decode_table import DecodeConfig

    case, reading = IN_CUDA["heads, mixed"]
    args, options = arguments(case, torch.bfloat16, DEVICE)
    parts = [stream.tensors for stream in args[2:5]]
    shifted = [list(stream) for stream in parts]
    codes = shifted[0][0]
    room = torch.empty(codes.numel() + 8, dtype=codes.dtype, device=DEVICE)
    shifted[0][0] = room[8:].view_as(codes).copy_(codes)
    config = DecodeConfig(block_tokens=32, n_warps=4, n_stages=2, n_splits=3, in_cuda=1, **reading)
    wanted, wanted_sums = expected(case, args, options)
    seen = wanted_sums.isfinite()
    # Triton makes keys numbers of the queries' type, bfloat16; in CUDA codes go to products as they are.
    for streams, bound in ((parts, 1e-4), (shifted, 2.5e-2)):
        out, sums = launch(config, *args[:2], list(case.kinds), *streams, args[5], options["n_packed"], [], 0)
        assert (out.double().cpu() - wanted).norm() / wanted.norm() < 2.5e-2
        torch.testing.assert_close(sums.double().cpu()[seen], wanted_sums[seen], rtol=bound, atol=bound)


@runs
@pytest.mark.parametrize(
    "case",
    [
        Case(("q4_0", "q8_0"), (20,), heads=(8, 1), dims=(128, 96, 128), packed=16),
        Case(("q4_0", "q8_0"), (20,), heads=(8, 1), dims=(32, 64, 32), packed=16),
        Case(("q4_0", "bf16"), (20,), heads=(8, 1), dims=(128, 64, 128), packed=16),
        Case(("q4_0", "q8_0"), (20,), heads=(8, 2), dims=(128, 64, 128), packed=16),
    ],
    ids=("no power of two", "too few words", "numbers", "heads"),
)
def test_what_cannot_be_read_by_words_of_a_latent_is_read_as_before(case: Case) -> None:
    assert kernel_of(case, torch.float16, n_heads=1) == "split_kv_kernel"


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kinds", [("q8_0",) * 3, ("q4_0",) * 3, ("nf4",) * 3, ("q4_0", "q8_0", "q4_0")], ids="+".join)
def test_long_sequences_by_heads_together_on_a_gpu(kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    case = Case(kinds, (2100, 1999), heads=(32, 8), packed=1984, tail=128, capacity=2112)
    more = replace(case, heads=(16, 8), queries=2, window=700, null=True)
    assert kernel_of(case, dtype, n_heads=4) == "decode_heads"
    check(case, dtype, 5, block_tokens=128, n_heads=4, n_registers=168)
    check(case, dtype, 1, block_tokens=64, n_heads=4, n_warps=2, n_stages=2)
    check(more, dtype, 3, block_tokens=64, n_heads=4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kinds", [("q8_0", "q8_0"), ("q4_0", "q8_0"), ("nf4", "nf4")], ids="+".join)
def test_long_sequences_by_words_of_a_latent_on_a_gpu(kinds: tuple[str, str], dtype: torch.dtype) -> None:
    case = Case(kinds, (2100, 1999), heads=(32, 1), dims=(128, 64, 128), packed=1984, tail=128, capacity=2112)
    more = replace(case, heads=(20, 1), queries=2, window=700, null=True)
    assert kernel_of(case, dtype, n_heads=1) == "decode_latent"
    check(case, dtype, 5, block_tokens=128, block_rows=32, n_heads=1, n_registers=168)
    check(case, dtype, 1, block_tokens=64, block_rows=32, n_heads=1, n_warps=2, n_stages=3)
    check(more, dtype, 3, block_tokens=64, n_heads=1)
