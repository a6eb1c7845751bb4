"""The Triton kernel of decode attention against float64: in the interpreter on a CPU, as compiled on a GPU.

Triton has to be told to interpret before it is first imported, so on a CPU `test_in_the_interpreter.py` runs this file.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from caramba.ops.dba_decode import ZEROS
from tests.ops.decode_cases import Case, arguments, expected
from tests.ops.decode_runs import DEVICE, DTYPES, check, needs_gpu, runs

CASES = {
    "per head, mixed": Case(("q4_0", "q8_0", "q4_0"), (105, 0, 70), packed=64),
    "per head, exact": Case(("fp32", "fp16", "bf16"), (70, 1), queries=2),
    "per head, nf4 of heads that share a block": Case(("nf4", "nf4", "nf4"), (90,), packed=80, tail=16),
    "latent, mixed": Case(("q4_0", "q8_0"), (130, 70), heads=(8, 1), dims=(128, 64, 128), packed=64),
    "latent, nf4, window, null": Case(
        ("nf4", "nf4"), (120,), heads=(4, 1), dims=(128, 64, 128), queries=3, packed=80, window=50, null=True
    ),
    "widths that are no power of two": Case(
        ("q4_0", "nf4", "q8_0"), (99, 31), heads=(4, 2), dims=(48, 24, 152), packed=16
    ),
    "narrow, null, no group": Case(
        ("fp32", "q4_0", "q4_0"), (40,), heads=(2, 2), dims=(4, 8, 96), packed=20, null=True
    ),
    "fewer tokens than queries": Case(("fp16", "fp16"), (2, 0), heads=(3, 1), dims=(48, 24, 48), queries=5),
    "all in the tail": Case(("q8_0", "nf4"), (75,), heads=(2, 1), dims=(64, 32, 64)),
}


def small_enough(name: str, dtype: torch.dtype) -> bool:
    """The interpreter takes seconds: there float16 runs one case of each kind of tile."""
    return DEVICE == "cuda" or dtype == torch.float32 or name in ("per head, mixed", "latent, nf4, window, null")


@runs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_attention_on_the_dequantised_tokens(name: str, dtype: torch.dtype) -> None:
    if small_enough(name, dtype):
        check(CASES[name], dtype, n_splits=3)


@runs
def test_the_count_of_splits_changes_nothing() -> None:
    check(CASES["latent, mixed"], torch.float32, 1)
    check(replace(CASES["per head, mixed"], window=60, queries=4), torch.float32, 1)


def sums_of_splits(case: Case, n_splits: int, **reading: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's sums of exponentials by splits, base 2, [B, H, T, splits], and what they should be in all."""
    from caramba.kernels.triton.dba_decode import arguments as tensors_of
    from caramba.kernels.triton.dba_decode import plan, run_splits
    from caramba.kernels.triton.dba_decode_table import DecodeConfig

    args, options = arguments(case, torch.float32, DEVICE)
    streams = [stream for stream in args[2:5] if stream is not None]
    parts = ([*(stream.tensors for stream in streams), []])[:3]
    kinds, n_packed = [stream.kind for stream in streams], options["n_packed"]
    config = DecodeConfig(block_tokens=16, n_splits=n_splits, **reading)
    made = plan(config, *args[:2], kinds, *parts, n_packed, [], case.window or 0)
    _, sums = run_splits(made, tensors_of(*args[:2], *parts, args[5], n_packed, []))
    wanted = expected(case, args, options)[1]
    return sums.cpu().double().view(*wanted.shape, n_splits), wanted


OWN_TAILS = {
    "per head": (Case(("q4_0", "q8_0", "q4_0"), (54,), packed=48), {}),
    "heads together": (Case(("q4_0", "q8_0", "q4_0"), (54,), heads=(8, 4), packed=48), {"n_heads": 4}),
    "latent": (Case(("q4_0", "q8_0"), (54,), heads=(8, 1), dims=(128, 64, 128), packed=48), {}),
    "latent by words": (
        Case(("q4_0", "q8_0"), (54,), heads=(8, 1), dims=(128, 64, 128), packed=48),
        {"n_heads": 1},
    ),
}


@runs
@pytest.mark.parametrize("name", OWN_TAILS)
def test_a_tail_that_lengthens_no_share_is_the_last_splits_alone(name: str) -> None:
    case, reading = OWN_TAILS[name]
    # Three tiles of blocks: of four splits three have one each, and what is left is the tail.
    sums, wanted = sums_of_splits(case, 4, **reading)
    tail_alone = sums[..., -1] * math.log(2)
    blocks = replace(case, lengths=(case.packed,))
    _, of_blocks = sums_of_splits(blocks, 4, **reading)
    torch.testing.assert_close(torch.logaddexp(tail_alone, of_blocks), wanted, rtol=1e-4, atol=1e-4)
    assert sums.isfinite().all()


@runs
@pytest.mark.parametrize("name", OWN_TAILS)
def test_splits_with_a_tail_of_their_own_change_nothing(name: str) -> None:
    case, reading = OWN_TAILS[name]
    check(case, torch.float32, 6, block_tokens=16, **reading)
    # A window that begins behind the blocks; a tail that is longer than a share, beside a sequence without one.
    check(replace(case, window=5), torch.float32, 4, block_tokens=16, **reading)
    two = replace(case, lengths=(16, 54), packed=16, queries=2)
    check(two, torch.float32, 4, block_tokens=16, **reading)


@runs
def test_splits_of_many_rows_are_joined_by_fewer_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caramba.kernels.triton.dba_decode.MANY_ROWS", 4)
    for name in ("widths that are no power of two", "latent, nf4, window, null"):
        check(CASES[name], torch.float32, n_splits=3)


@runs
def test_the_op_runs_the_launcher_with_a_choice_of_the_table() -> None:
    from caramba.kernels.triton.dba_decode import dba_decode

    case = Case(("bf16", "bf16"), (100, 3), heads=(2, 1), dims=(32, 16, 32))
    args, _ = arguments(case, torch.float32, DEVICE)
    numbers = [stream.tensors for stream in args[2:4]]
    out, _ = dba_decode(*args[:2], ["bf16", "bf16"], *numbers, [], args[5], None, [], 0, 0, 0)
    wanted, _ = expected(case, args, {})
    torch.testing.assert_close(out.double().cpu(), wanted, rtol=1e-5, atol=1e-5)


# Every pair of what a kernel is compiled for meets in some way; all products of them would compile for minutes.
WAYS = ("one query", "packed", "plain")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["bf16", "q8_0", "q4_0", "nf4"])
@pytest.mark.parametrize("layout", ["latent", "per_head"])
def test_long_sequences_on_a_gpu(layout: str, kind: str, way: str, dtype: torch.dtype) -> None:
    if kind == "bf16" and way == "plain":
        pytest.skip("numbers have no packed instructions to leave out")
    latent = layout == "latent"
    case = Case(
        (kind,) * (2 if latent else 3),
        (2100, 1999),
        heads=(32, 1) if latent else (32, 8),
        dims=(128, 64, 128) if latent else (16, 32, 64),
        packed=1984,
        tail=128,
        capacity=2112,
    )
    more = replace(case, queries=4, window=700, null=True)
    if way == "one query":
        check(case, dtype, 5, True, 64)
    else:
        check(more, dtype, 3, way == "packed", 128)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kinds", [("q8_0", "q8_0"), ("q4_0", "q8_0")], ids="+".join)
def test_fewer_registers_and_more_warps_change_nothing(kinds: tuple[str, str]) -> None:
    lengths = (2100, 1999)
    case = Case(kinds, lengths, heads=(32, 1), dims=(128, 64, 128), packed=1984, tail=128, capacity=2112, queries=1)
    for n_splits in (1, 5):
        check(
            case,
            torch.bfloat16,
            n_splits,
            block_tokens=128,
            block_rows=32,
            n_warps=8,
            n_stages=2,
            n_registers=128,
        )


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_follows_the_lengths() -> None:
    from caramba import kernels
    from caramba.ops.dba_decode import dba_decode

    assert kernels.load("cuda")["dba_decode"] == "triton"
    case = Case(("q4_0", "q8_0"), (400, 300), heads=(32, 1), dims=(128, 64, 128), packed=320, tail=128, capacity=512)
    args, options = arguments(case, torch.bfloat16, DEVICE)
    lengths, packed = args[5], options["n_packed"]
    dba_decode(*args, **options)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = dba_decode(*args, **options)
    for shorter, blocks in (((400, 300), 320), ((330, 0), 256), ((64, 65), 64)):
        part = replace(case, lengths=shorter, packed=blocks)
        fresh, _ = arguments(part, torch.bfloat16, DEVICE)
        for mine, theirs in zip(args[2:4], fresh[2:4], strict=True):
            for x, y in zip(mine.tensors, theirs.tensors, strict=True):
                x.copy_(y)
        lengths.copy_(torch.tensor(shorter))
        packed.fill_(blocks)
        graph.replay()
        wanted, _ = expected(part, args, options)
        assert (out.double().cpu() - wanted).norm() / wanted.norm() < 2.5e-2


@runs
@pytest.mark.parametrize(
    ("kinds", "dtype"), [(("q8_0", ZEROS, "q4_0"), DTYPES[-1]), (("nf4", ZEROS, "nf4"), torch.float32)]
)
def test_keys_of_one_part_are_read_beside_zeros_that_take_no_memory(
    kinds: tuple[str, str, str], dtype: torch.dtype
) -> None:
    from caramba.kernels.triton.dba_decode import dba_decode, launch
    from caramba.kernels.triton.dba_decode_table import DecodeConfig

    case = Case(kinds, (73, 32), packed=32, dims=(64, 16, 64), null=kinds[0] == "nf4")
    args, options = arguments(case, dtype, DEVICE)
    assert args[3].values.untyped_storage().nbytes() == 32
    null = list(options.get("null", ()))
    wanted, wanted_sums = expected(case, args, options)
    streams = [stream.tensors for stream in args[2:5]]
    call = (*args[:2], list(kinds), *streams, args[5], options["n_packed"], null, 0)
    way = DecodeConfig(block_tokens=32, n_splits=3)
    for out, sums in (launch(way, *call), dba_decode(*call, 0, 0)):
        bound = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}[dtype]
        assert (out.double().cpu() - wanted).norm() / wanted.norm() < bound
        torch.testing.assert_close(sums.double().cpu(), wanted_sums, rtol=bound, atol=bound)
