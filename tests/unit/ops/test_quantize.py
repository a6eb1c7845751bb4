"""Quantise and dequantise: contracts, error bounds, layouts of other software, and bad input."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from caramba.config.kvcache import BLOCKS
from caramba.errors import ConfigError
from caramba.ops.formats import (
    NF4_LEVELS,
    STORED,
    dequantize,
    hadamard,
    pack_nibbles,
    quantize,
    unpack_nibbles,
)
from tests.unit.ops.canonical import from_bitsandbytes, from_ggml, to_bitsandbytes, to_ggml

KINDS = tuple(STORED)
# The largest error in units of the scale: half a step; a whole one where q4_0's levels end at +7; half NF4's widest gap.
BOUND = {"q8_0": 0.5, "q4_0": 1.0, "nf4": 0.1519037}


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3


@pytest.mark.parametrize("kind", KINDS)
def test_contracts_hold_under_opcheck(kind: str) -> None:
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    permuted = rows(40, 2, 3).float().permute(1, 2, 0)
    for x in (permuted, rows(0, 33).half()):
        torch.library.opcheck(torch.ops.caramba.quantize.default, (x, kind), test_utils=tests)
        codes, scales = quantize(x, kind)
        arguments = (codes, scales, kind, x.shape[-1], torch.float32)
        torch.library.opcheck(torch.ops.caramba.dequantize.default, arguments, test_utils=tests)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 96, 200])
def test_the_error_is_bounded_by_the_scale(kind: str, width: int) -> None:
    x = rows(50, width)
    codes, scales = quantize(x, kind)
    form, blocks = BLOCKS[kind], -(-width // BLOCKS[kind].elements)
    assert codes.shape == (50, blocks, form.code_bytes)
    assert codes.nbytes + scales.nbytes == 50 * form.row_bytes(width)
    # The steps that exact arithmetic in float64 gives, one for each element.
    steps = scales.double().abs().repeat_interleave(form.elements, dim=1)[:, :width]
    error = (dequantize(codes, scales, kind, width, torch.float64) - x).abs()
    assert (error <= steps * (BOUND[kind] + 2e-3)).all()
    assert width < 31 or (error > 0.45 * BOUND[kind] * steps).any()  # the bound is near


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides_and_floating_types_give_the_same_codes(kind: str) -> None:
    x = rows(3, 5, 70).bfloat16()
    expected = quantize(x.contiguous(), kind)
    moved = x.transpose(0, 2).contiguous().transpose(0, 2)
    assert not moved.is_contiguous()
    for same in (moved, x.float(), x.double()):
        for got, want in zip(quantize(same, kind), expected, strict=True):
            assert torch.equal(got, want)
    assert dequantize(*expected, kind, 70, torch.float16).dtype == torch.float16


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_stay_and_what_is_not_finite_is_not_hidden(kind: str) -> None:
    x = rows(4, 192)
    x[0] = 0
    x[1, 3], x[2, 70] = float("nan"), float("-inf")
    x[3, 130] = 1e9
    back = dequantize(*quantize(x, kind), kind, 192)
    assert (back[0] == 0).all()
    elements = BLOCKS[kind].elements
    for row, at in ((1, 3), (2, 70)):
        start = at // elements * elements
        assert not back[row, start : start + elements].isfinite().any()
        assert back[row, :start].isfinite().all()
        assert back[row, start + elements :].isfinite().all()
    big = back[3, 128:160]
    assert (big[2] - 1e9).abs() < 1e7 if kind == "nf4" else not big.isfinite().any()


def test_values_that_levels_hold_are_exact() -> None:
    step = 0.25
    q8 = torch.arange(-127, 128) * step
    for block in q8[:224].split(32):
        with_peak = torch.cat((block[:31], torch.tensor([127 * step])))
        assert torch.equal(dequantize(*quantize(with_peak, "q8_0"), "q8_0", 32), with_peak)
    q4 = torch.arange(-8, 8).repeat(2) * step
    assert torch.equal(dequantize(*quantize(q4, "q4_0"), "q4_0", 32), q4)
    nf4 = torch.tensor(NF4_LEVELS).repeat(4) * step
    assert torch.equal(dequantize(*quantize(nf4, "nf4"), "nf4", 64), nf4)


def test_nf4_levels_are_the_quantiles_that_the_paper_derives() -> None:
    def quantiles(n: int) -> Tensor:
        return torch.special.ndtri(torch.linspace(0.9677083, 0.5, n, dtype=torch.float64)[:-1])

    levels = torch.cat((quantiles(9), torch.zeros(1, dtype=torch.float64), -quantiles(8))).sort().values
    torch.testing.assert_close(levels / levels.max(), torch.tensor(NF4_LEVELS).double(), rtol=0, atol=2e-7)


def ggml_values(block: bytes, kind: str) -> list[float]:
    """One block read byte by byte, as ggml's documentation of the format has it."""
    (scale,) = struct.unpack("<e", block[:2])
    if kind == "q8_0":
        return [scale * code for code in struct.unpack("<32b", block[2:])]
    low, high = [byte & 15 for byte in block[2:]], [byte >> 4 for byte in block[2:]]
    return [scale * (code - 8) for code in (*low, *high)]


def ggml_codes(values: list[float], scale: float, kind: str) -> bytes:
    if kind == "q8_0":
        return struct.pack(
            "<32b", *(int(value / scale + 0.5 if value > 0 else value / scale - 0.5) for value in values)
        )
    codes = [min(15, int(value / scale + 8.5)) for value in values]
    return bytes(low | high << 4 for low, high in zip(codes[:16], codes[16:], strict=True))


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_blocks_are_ggmls(kind: str) -> None:
    x = rows(3, 96).float()
    peak = 127 * 0.03125 if kind == "q8_0" else -8 * 0.25  # whose scale fp16 holds
    x = x.clamp(-abs(peak), abs(peak)) * 0.9
    x[:, ::32] = peak
    codes, scales = quantize(x, kind)
    packed = to_ggml(codes, scales, kind)
    size = 34 if kind == "q8_0" else 18
    assert packed.shape == (3, 3 * size)
    back = dequantize(codes, scales, kind, 96)
    for row in range(3):
        data = bytes(packed[row].tolist())
        for block in range(3):
            raw, at = data[block * size : (block + 1) * size], slice(32 * block, 32 * block + 32)
            assert ggml_values(raw, kind) == back[row, at].tolist()
            assert raw[2:] == ggml_codes(x[row, at].tolist(), struct.unpack("<e", raw[:2])[0], kind)
    for got, want in zip(from_ggml(packed, kind), (codes, scales), strict=True):
        assert torch.equal(got, want)


def test_nf4_bytes_are_bitsandbytes() -> None:
    codes, scales = quantize(rows(3, 128).float(), "nf4")
    packed, maxima = to_bitsandbytes(codes, scales)
    assert packed.shape == (3, 64)
    levels = torch.tensor(NF4_LEVELS)
    pairs = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2)  # neighbours, the first high
    values = levels[pairs.int()] * maxima.repeat_interleave(64, dim=1)
    assert torch.equal(values, dequantize(codes, scales, "nf4", 128))
    for got, want in zip(from_bitsandbytes(packed, maxima), (codes, scales), strict=True):
        assert torch.equal(got, want)


def test_nibbles_round_trip() -> None:
    codes = torch.randint(16, (4, 3, 32), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize("width", [1, 3, 4, 48, 64])
def test_hadamard_is_orthogonal_and_spreads(width: int) -> None:
    q, k = rows(5, width), rows(5, width, seed=1)
    torch.testing.assert_close(hadamard(hadamard(q)), q)
    torch.testing.assert_close((hadamard(q) * hadamard(k)).sum(-1), (q * k).sum(-1))
    spike = torch.zeros(width)
    spike[0] = 1.0
    assert hadamard(spike).abs().max() == pytest.approx((width & -width) ** -0.5)


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match=r"kind=fp16 is not a block format; use one of: q8_0, q4_0, nf4"):
        quantize(rows(2, 32), "fp16")
    with pytest.raises(ConfigError, match=r"x is torch.int64 of shape \(32,\), expected a floating dtype"):
        quantize(torch.arange(32), "q8_0")
    codes, scales = quantize(rows(2, 32), "q4_0")
    with pytest.raises(ConfigError, match=r"do not hold 40 elements of q4_0; expected codes \[..., 2, 16\]"):
        dequantize(codes, scales, "q4_0", 40)
    with pytest.raises(ConfigError, match=r"scales torch.float32 on cpu, q4_0 has torch.uint8 and torch.float16"):
        dequantize(codes, scales.float(), "q4_0", 32)
    with pytest.raises(ConfigError, match=r"expected uint8 rows of a multiple of 34 bytes"):
        from_ggml(torch.zeros(35, dtype=torch.uint8), "q8_0")
    with pytest.raises(ConfigError, match=r"ggml has no blocks of kind nf4"):
        to_ggml(codes, scales, "nf4")


def test_blocks_of_another_kind_are_not_written_as_bytes() -> None:
    eight, four = (quantize(rows(2, 64).float(), kind) for kind in ("q8_0", "q4_0"))
    for codes, scales in (
        four,
        (eight[0], eight[1].float()),
        (eight[0].int(), eight[1]),
        (eight[0][0, 0], eight[1]),
    ):
        with pytest.raises(ConfigError, match=r"ggml q8_0: got codes .*expected torch.int8 \[..., N, 32\]"):
            to_ggml(codes, scales, "q8_0")
    for blocks in (eight, four):
        with pytest.raises(ConfigError, match=r"bitsandbytes nf4: got codes .*expected torch.uint8 \[..., N, 32\]"):
            to_bitsandbytes(*blocks)
    packed = torch.zeros(32, dtype=torch.uint8)
    for maxima in (torch.ones(1).half(), torch.tensor(1.0), torch.ones(2)):
        with pytest.raises(ConfigError, match=r"32 bytes for each maximum, and those in float32"):
            from_bitsandbytes(packed, maxima)
    with pytest.raises(ConfigError, match=r"of shape \(\), expected uint8 rows"):
        from_ggml(torch.tensor(1, dtype=torch.uint8), "q8_0")
