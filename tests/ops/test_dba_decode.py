"""Decode attention on stored formats: the contract, the reference against float64, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.ops.dba_decode import StoredStream, dba_decode, reference_dba_decode
from tests.ops.decode_cases import Case, arguments, expected

KINDS = ("fp32", "fp16", "bf16", "q8_0", "q4_0", "nf4")
PER_HEAD = Case(("q4_0", "q8_0", "bf16"), (150, 0, 1, 97), packed=64)
LATENT = Case(("nf4", "fp16"), (130, 64), heads=(6, 1), dims=(48, 24, 48), packed=64)
CASES = {
    "per head": PER_HEAD,
    "several queries, ragged, fewer tokens than queries": replace(PER_HEAD, queries=5),
    "window": replace(PER_HEAD, queries=3, window=40),
    "null": replace(PER_HEAD, null=True, queries=2),
    "latent": LATENT,
    "latent, null, window": replace(LATENT, null=True, window=7, queries=4),
    "narrow and odd widths": Case(("fp32", "q4_0", "nf4"), (99, 31), dims=(4, 8, 152), heads=(3, 1), packed=16),
    "all in the tail": Case(("q8_0", "q8_0", "q8_0"), (80, 12)),
    "numbers, ragged, window": Case(("fp32", "bf16", "fp16"), (150, 0, 1, 97), queries=3, window=40),
    "numbers, latent, ragged": Case(("fp32", "fp16"), (130, 64), heads=(6, 1), dims=(48, 24, 48), queries=5),
    "numbers, of one length": Case(("fp32", "fp32", "bf16"), (97, 97)),
    "nothing stored": Case(("fp32", "fp32"), (0, 0), heads=(2, 1)),
}


def by_reference(args: list[Any], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What devices without a kernel run; a CPU has its own."""
    streams = [stream for stream in args[2:5] if stream is not None]
    parts = [stream.tensors for stream in streams] + [[]] * (3 - len(streams))
    null = list(options.get("null", ()))
    rest = (options.get("n_packed"), null, options.get("window") or 0, 0, 0)
    return reference_dba_decode(*args[:2], [stream.kind for stream in streams], *parts, args[5], *rest)


@pytest.mark.parametrize("name", CASES)
def test_the_op_and_its_reference_are_attention_on_the_dequantised_tokens(name: str) -> None:
    args, options = arguments(CASES[name], torch.float64)
    wanted, wanted_sums = expected(CASES[name], args, options)
    for out, sums in (dba_decode(*args, **options), by_reference(args, options)):
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(sums.double(), wanted_sums, rtol=1e-6, atol=1e-6)


def test_each_sequence_has_blocks_of_its_own_and_an_idle_one_none() -> None:
    case = replace(PER_HEAD, lengths=(150, 120, 20, 97), queries=3)
    args, options = arguments(case, torch.float64)
    lengths = torch.tensor([150, 300, 20, 0], dtype=torch.int32)
    packed = torch.tensor([64, 32, 0, -1], dtype=torch.int32)
    # Blocks that other counts of them uncover are numbers too.
    args[2:4] = [stream._replace(scales=stream.scales.nan_to_num(0.5)) for stream in args[2:4]]
    args[2:5] = [stream._replace(values=stream.values.nan_to_num(0.5)) for stream in args[2:5]]
    args[2:4] = [stream._replace(tail=stream.tail.nan_to_num(0.5)) for stream in args[2:4]]
    args[5], options["n_packed"] = lengths, packed
    found, wanted = dba_decode(*args, **options), by_reference(args, options)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    assert not found[0][3].any()


@pytest.mark.parametrize("at", [3, 4])
def test_keys_or_values_that_are_one_row_in_memory_are_read_once(at: int) -> None:
    kinds = ("q8_0", "bf16", "q4_0") if at == 3 else ("q8_0", "q8_0", "bf16")
    args, options = arguments(replace(PER_HEAD, kinds=kinds, queries=2), torch.float64)
    width = PER_HEAD.dims[at - 2]
    row = torch.randn(2, 1, width).bfloat16()
    args[at] = StoredStream("bf16", row.expand(4, 2, 256, width))
    for one, other in zip(dba_decode(*args, **options), by_reference(args, options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("layout", ["per_head", "latent"])
def test_every_mix_of_formats(layout: str) -> None:
    n_streams = 3 if layout == "per_head" else 2
    for kinds in itertools.product(KINDS, repeat=n_streams):
        if n_streams == 3 and kinds[0] != kinds[2] and "fp32" not in kinds:
            continue  # a third of the triples; the tile code is one per stream
        case = Case(kinds, (40,), heads=(2, 2) if n_streams == 3 else (2, 1), packed=32, tail=8, capacity=40)
        args, options = arguments(case, torch.float64)
        wanted, _ = expected(case, args, options)
        for out, _ in (dba_decode(*args, **options), by_reference(args, options)):
            torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9)


def test_parts_of_the_keys_merge_by_their_sums() -> None:
    args, options = arguments(Case(("fp32", "fp32", "fp32"), (100,)), torch.float64)
    whole, total = dba_decode(*args, **options)
    merged = torch.zeros_like(whole)
    for start, end in ((0, 37), (37, 100)):
        part = [stream._replace(values=stream.values[:, :, start:end]) for stream in args[2:5]]
        out, sums = dba_decode(*args[:2], *part, torch.tensor([end - start], dtype=torch.int32))
        merged += out * torch.exp(sums - total)[..., None]
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-5)


def test_a_length_beyond_what_is_allocated_counts_as_that() -> None:
    args, options = arguments(Case(("bf16", "bf16"), (256,), heads=(2, 1), capacity=256), torch.float32)
    wanted = dba_decode(*args, **options)
    got = dba_decode(*args[:5], args[5] + 1000, **options)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])


def test_lengths_that_only_the_device_knows_are_checked_in_debug_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logger, "is_debug", True)
    args, options = arguments(PER_HEAD, torch.float32)
    dba_decode(*args, **options)
    most = PER_HEAD.packed + PER_HEAD.tail
    for length in (-1, most + 1):
        said = rf"dba_decode: seqlens: got {length} in sequence 2 of at most {most}, expected 0 to what is allocated"
        lengths = args[5].clone()
        lengths[2] = length
        with pytest.raises(ConfigError, match=said):
            dba_decode(*args[:5], lengths, **options)
    with pytest.raises(ConfigError, match=r"n_packed: got \[257\], expected 0 to 256"):
        dba_decode(*args, **options | {"n_packed": options["n_packed"] * 0 + 257})


@pytest.mark.parametrize("name", ["per head", "latent, null, window"])
def test_contract_holds_under_opcheck(name: str) -> None:
    args, options = arguments(CASES[name], torch.float32)
    streams = [stream for stream in args[2:5] if stream is not None]
    parts = [stream.tensors for stream in streams] + [[]] * (3 - len(streams))
    # Queries and numbers in another order in memory than that of their axes.
    q_sem, q_geo = (q.transpose(1, 2).contiguous().transpose(1, 2) for q in args[:2])
    parts = [[x.transpose(1, 2).contiguous().transpose(1, 2) for x in part] for part in parts]
    null = list(options.get("null", ()))
    flat = (q_sem, q_geo, [stream.kind for stream in streams], *parts, args[5], options["n_packed"], null)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    op = torch.ops.caramba.dba_decode.default
    torch.library.opcheck(op, (*flat, options["window"] or 0, 0, 0), test_utils=tests)


def refuse(message: str, change: dict[int | str, Any], case: Case = PER_HEAD) -> None:
    args, options = arguments(case, torch.float32)
    for key, value in change.items():
        if isinstance(key, int):
            args[key] = value(args[key])
        else:
            options[key] = value(options.get(key))
    with pytest.raises(ConfigError, match=message):
        dba_decode(*args, **options)


def test_what_does_not_fit_is_refused_by_name() -> None:
    refuse(
        r"q_geo: got torch.float64 .* expected \[4, 4, 1, Dgeo\] in q_sem's torch.float32",
        {1: torch.Tensor.double},
    )
    refuse(r"q_sem: got 9 queries per sequence, expected 1 to 8", {0: wide, 1: wide})
    refuse(r"k_sem: got 2 key/value heads, expected 1, as a latent has, or pass v", {4: lambda v: None})
    refuse(r"k_sem: got 2 key/value heads, expected a number that divides the 3", {0: three, 1: three})
    refuse(
        r"v: got torch.bfloat16, expected torch.float16, the dtype of kind fp16",
        {4: lambda v: v._replace(kind="fp16")},
    )
    refuse(r"v.kind: got mixed, expected one of fp32", {4: lambda v: v._replace(kind="mixed")})
    refuse(r"k_geo: got 2 tensors, expected values, scales and tail", {3: lambda k: k._replace(tail=None)})
    refuse(r"k_geo.values: got torch.uint8 .* torch.int8", {3: lambda k: k._replace(values=k.values.byte())})
    refuse(
        r"k_geo.scales: got torch.float32 .* torch.float16",
        {3: lambda k: k._replace(scales=k.scales.float())},
    )
    refuse(r"v: got stride 256 along the last axis, expected 1", {4: strided})
    refuse(r"seqlens: got torch.int64 \[4\] on cpu, expected int32 \[4\] on cpu", {5: torch.Tensor.long})
    refuse(r"seqlens: got stride 2, expected contiguous", {5: lambda n: n.repeat_interleave(2)[::2]})
    refuse(r"n_packed: got none, expected one exactly where", {"n_packed": lambda n: None})
    refuse(
        r"null: got torch.float32 \[2, 3\].*, expected rows \[\(2, 16\), ",
        {"null": lambda n: (torch.ones(2, 3),)},
    )
    refuse(r"window: got -1, expected 1 or more", {"window": lambda n: -1})


def wide(q: torch.Tensor) -> torch.Tensor:
    return q.expand(-1, -1, 9, -1)


def three(q: torch.Tensor) -> torch.Tensor:
    return q[:, :3]


def strided(v: Any) -> Any:
    return v._replace(values=v.values.transpose(2, 3).contiguous().transpose(2, 3))


def emptied(x: Any) -> Any:
    if isinstance(x, StoredStream):
        return StoredStream(x.kind, *(part[:0] for part in x.tensors))
    return None if x is None else x[:0]


@pytest.mark.parametrize("kinds", [("fp32", "fp32"), ("fp32", "fp32", "bf16"), ("q8_0", "fp16", "bf16")])
def test_no_sequence_gives_no_row(kinds: tuple[str, ...]) -> None:
    args, options = arguments(Case(kinds, (4, 2), heads=(4, len(kinds) - 1)), torch.float32)
    none = [emptied(x) for x in args]
    whole, rows = dba_decode(*args, **options), dba_decode(*none, **options)
    assert [x.shape for x in rows] == [(0, *x.shape[1:]) for x in whole]
    assert [x.dtype for x in rows] == [x.dtype for x in whole]


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    args, options = arguments(Case(("fp32", "fp32", "fp32"), (2,), queries=4), torch.float32)
    out, sums = dba_decode(*args, **options)
    assert (out[:, :, :2] == 0).all()
    assert (sums[:, :, :2] == -math.inf).all()
    assert sums[:, :, 2:].isfinite().all()
