"""Splits of decode attention that begin while the kernel ahead ends, and their join: nothing of what it stores is missed."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.decode_cases import Case, arguments

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no kernels that begin early"
)
LATENT = Case(("bf16",) * 2, (2112,) * 16, heads=(32, 1), dims=(128, 64, 128), capacity=2112)
HEADS = Case(("bf16",) * 3, (2112,) * 16, heads=(32, 8), dims=(16, 32, 64), capacity=2112)
LATENT_OF_BLOCKS = replace(LATENT, kinds=("q4_0", "q8_0"), packed=1984, tail=128)
HEADS_OF_BLOCKS = replace(HEADS, kinds=("q4_0", "q8_0", "q4_0"), packed=1984, tail=128)
BY_WORDS = {"block_rows": 32, "n_heads": 1, "n_registers": 168}
TOGETHER = {"block_rows": 16, "n_heads": 4, "n_registers": 168}
LATENT_IN_CUDA = {
    "block_rows": 32,
    "block_tokens": 32,
    "n_warps": 8,
    "n_stages": 2,
    "n_heads": 1,
    "in_cuda": 1,
}
HEADS_IN_CUDA = {"block_rows": 8, "block_tokens": 32, "n_warps": 4, "n_stages": 2, "n_heads": 2, "in_cuda": 1}
WAYS: dict[str, tuple[Case, dict[str, int], str]] = {
    "latent": (LATENT, {}, "split_kv_kernel"),
    "heads": (HEADS, {}, "split_kv_kernel"),
    "latent by words": (LATENT_OF_BLOCKS, BY_WORDS, "decode_latent"),
    "heads together": (HEADS_OF_BLOCKS, TOGETHER, "decode_heads"),
    "latent in CUDA": (LATENT_OF_BLOCKS, LATENT_IN_CUDA, "decode_latent"),
    "latent in CUDA by groups of warps": (
        LATENT_OF_BLOCKS,
        {**LATENT_IN_CUDA, "variant": 1},
        "decode_latent",
    ),
    "heads in CUDA": (HEADS_OF_BLOCKS, HEADS_IN_CUDA, "decode_heads"),
}
"""Tokens, the way to read them, and the kernel that does."""


def module(name: str) -> ModuleType:
    return importlib.import_module(f"caramba.kernels.{name}")


def planned(name: str, n_splits: int, batch: int, device: str) -> tuple[Any, list[Any], Tensor | None]:
    """Return the plan of a way, the tensors that it is a plan of but for the lengths, and how much is blocks."""
    case, reading, kernel = WAYS[name]
    args, options = arguments(replace(case, lengths=case.lengths[:batch]), torch.bfloat16, device)
    parts = [*(stream.tensors for stream in args[2:5] if stream is not None), []][:3]
    config = module("triton.dba_decode_table").DecodeConfig(n_splits=n_splits, **reading)
    n_packed = options.get("n_packed")
    made = module("triton.dba_decode").plan(config, *args[:2], list(case.kinds), *parts, n_packed, [], 0)
    is_in_cuda = type(made.split).__name__ == "CudaLaunch"
    assert is_in_cuda == bool(config.in_cuda)
    assert (made.split.name if is_in_cuda else made.split.kernel.__name__) == kernel
    early = made.split.config.n_attributes if is_in_cuda else made.split.options["launch_pdl"]
    assert early == 1
    assert made.join.options["launch_pdl"] is True
    return made, [*args[:2], *parts], n_packed


@pytest.mark.parametrize("name", WAYS)
def test_ways_are_those_that_they_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("pdl", "dba_decode"):
        monkeypatch.setattr(module(f"triton.{part}"), "arch", lambda device: "sm90")
    for question, answer in (("is_ready", True), ("is_hopper", True), ("most_shared", 227 * 1024)):
        monkeypatch.setattr(module("cuda.decode"), question, lambda device, answer=answer: answer)
    made, _, _ = planned(name, 5, 1, "cpu")
    if WAYS[name][1].get("in_cuda"):
        assert made.split.features == ("a" if "groups" in name else "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("n_splits", [2, 5, 40])
@pytest.mark.parametrize("name", WAYS)
def test_splits_and_their_join_read_what_the_kernel_ahead_stores_last(name: str, n_splits: int) -> None:
    from tests.ops.late_writer import skip_where_nothing_begins_early, store_late

    skip_where_nothing_begins_early("cuda")
    if WAYS[name][1].get("in_cuda") and module("cuda.nvrtc").version() is None:
        pytest.skip("needs NVRTC")
    made, given, n_packed = planned(name, n_splits, 16, "cuda")
    # Eleven steps of sixteen sequences, none of which is as long as any other.
    lengths = torch.arange(187, 2113, 11, dtype=torch.int32, device="cuda").view(11, 16)
    seqlens = torch.zeros_like(lengths[0])
    tensors = module("triton.dba_decode").arguments(*given, seqlens, n_packed, [])
    run = module("triton.dba_decode").run

    def steps(wait: Callable[[], None]) -> list[Tensor]:
        results = []
        for one in lengths:
            store_late(seqlens, one)
            wait()
            results += run(made, tensors)
            wait()
        return results

    wanted = steps(torch.cuda.synchronize)
    if WAYS[name][1].get("in_cuda"):
        assert made.split.made is not None, "Triton runs in its place"
    assert all(x.isfinite().all() for x in wanted)
    assert not any(torch.equal(x, y) for x, y in itertools.pairwise(wanted[::2])), "old lengths would not show"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = steps(lambda: None)
    for _ in range(20):
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        for x, y in zip(results, wanted, strict=True):
            assert torch.equal(x, y), "the same sums in the same order"
