"""What the emulator of a warp does for each instruction, against NumPy; and that it sees what a kernel leaves out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.ops.emulated import DESCENDING, EARLY, MODES, EmulatedKernel, needs_compiler

pytestmark = needs_compiler
SOURCE = Path(__file__).parent / "warp_emulator" / "each_instruction.cu"
SHARED = 8192


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16's bits, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("name", ["product_f16", "product_bf16"])
def test_products_take_their_fragments_from_where_a_gpu_does(name: str) -> None:
    a, b, c = (rng().standard_normal(shape).astype(np.float32) for shape in ((16, 16), (16, 8), (16, 8)))
    if name == "product_f16":
        left, right = a.astype(np.float16), b.astype(np.float16)
        expected = c + left.astype(np.float64) @ right.astype(np.float64)
    else:
        left, right = to_bf16(a), to_bf16(b)
        expected = c + from_bf16(left).astype(np.float64) @ from_bf16(right).astype(np.float64)
    EmulatedKernel(SOURCE, name)((1, 1), 32, 0, [c, left, right])
    np.testing.assert_allclose(c, expected, rtol=1e-6, atol=1e-6)


def test_tiles_are_given_by_rows_and_by_columns() -> None:
    x = rng().integers(0, 1 << 16, (4, 8, 8), dtype=np.uint16)
    out = np.zeros(544 * 2, np.uint16)
    EmulatedKernel(SOURCE, "matrices")((1, 1), 32, SHARED, [out, x])
    plain = x.reshape(4, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4, 2)
    turned = x.transpose(0, 2, 1).reshape(4, 8, 4, 2).transpose(1, 2, 0, 3).reshape(32, 4, 2)
    np.testing.assert_array_equal(out[:512].reshape(2, 32, 4, 2), [plain, turned])
    np.testing.assert_array_equal(out[512:576].reshape(32, 2), turned[:, 0])
    np.testing.assert_array_equal(out[576:832].reshape(4, 8, 8), x)
    np.testing.assert_array_equal(out[832:].reshape(4, 8, 8), x.transpose(0, 2, 1))


@pytest.mark.parametrize("mode", MODES)
def test_copies_arrive_by_groups_and_fill_with_zeros(mode: int) -> None:
    warps, blocks = 2, 3
    lanes = 32 * warps
    x = rng().integers(0, 1 << 32, (blocks, 3, lanes, 4), dtype=np.uint32)
    out = np.zeros_like(x)
    EmulatedKernel(SOURCE, "copies")((blocks, 1), lanes, SHARED, [out, x, warps], mode)
    expected = x.copy()
    expected[:, 1, ::2] = 0
    np.testing.assert_array_equal(out, np.roll(expected, -1, axis=2))


@pytest.mark.parametrize("mode", [0, DESCENDING])
def test_a_sync_that_is_missing_after_a_wait_shows(mode: int) -> None:
    x = rng().integers(0, 1 << 32, (1, 3, 32, 4), dtype=np.uint32)
    out = np.zeros_like(x)
    kernel = EmulatedKernel(SOURCE, "copies", {"WITHOUT_SYNC": 1})
    kernel((1, 1), 32, SHARED, [out, x, 1], mode)
    x[:, 1, ::2] = 0
    assert (out != np.roll(x, -1, axis=2)).any()
    assert (out == 0xFFFFFFFF).any(), "shared memory that nothing was written to"


def test_numbers() -> None:
    a, b, c = rng().integers(0, 1 << 32, (3, 32), dtype=np.uint32)
    a[:4], b[:4] = [0x3C003C00, 0x7BFF7BFF, 0x00010001, 0x80018001], [0x3C013C01, 0x7BFF7BFF, 0x38003800, 0]
    floats = (rng().standard_normal((2, 32)) * np.exp2(np.arange(-28, 36, 2))).astype(np.float32)
    kernel = EmulatedKernel(SOURCE, "numbers")
    # Below bfloat16's smallest normal number, as codes are: 15 and 1 times 2^-133 by 2^69, and 240 and 16.
    a[4:6], b[4:6], c[4:6] = [0x000F0001, 0x00F00010], 0x62006200, [0x80008000, 0x1F803F80]
    out = np.zeros((20, 32), np.uint32)
    kernel((1, 1), 32, 0, [out, a, b, c])

    np.testing.assert_array_equal(out[0], (a & b) | c)
    np.testing.assert_array_equal(out[1], (a & b) ^ c)
    held = np.concatenate([a[:, None].view(np.uint8), b[:, None].view(np.uint8)], 1)
    picks = c[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    taken = np.take_along_axis(held, (picks & 7).astype(np.int64), 1)
    taken = np.where(picks & 8, np.where(taken >> 7, 255, 0), taken)
    np.testing.assert_array_equal(out[2], taken.astype(np.uint8).copy().view(np.uint32)[:, 0])

    halves = [x.view(np.uint16).view(np.float16).astype(np.float64) for x in (a, b, c)]
    with np.errstate(all="ignore"):
        made = halves[0] * halves[1], halves[0] * halves[1] + halves[2]
        for i, expected in enumerate(made):
            found = out[3 + i].view(np.float16)
            np.testing.assert_array_equal(found, expected.astype(np.float16), err_msg=str(i))
        brains = [from_bf16(x.view(np.uint16)).astype(np.float64) for x in (a, b, c)]
        found = from_bf16(out[19].view(np.uint16))
        near = to_bf16((brains[0] * brains[1] + brains[2]).astype(np.float32))
        is_finite = np.isfinite(from_bf16(near))
        # By way of float32, whose rounding may be the other one of a tie.
        np.testing.assert_allclose(found[is_finite], from_bf16(near)[is_finite], rtol=2**-7)
    np.testing.assert_array_equal(found[8:10], np.array([2.0**-64, 15 * 2.0**-64], np.float32))
    np.testing.assert_array_equal(out[7].view(np.float32), a.view(np.float16)[::2].astype(np.float32))
    np.testing.assert_array_equal(out[8].view(np.float32), a.view(np.float16)[1::2].astype(np.float32))
    np.testing.assert_array_equal(out[9], a << 16)
    np.testing.assert_array_equal(out[10], a & 0xFFFF0000)
    lanes = np.arange(32)
    np.testing.assert_array_equal(out[11], a[lanes ^ 5])
    np.testing.assert_array_equal(out[12], a[31 - lanes])
    np.testing.assert_array_equal(out[13], a.astype(np.uint64) * b >> 32)
    bytes_ = [x[:, None].view(np.uint8).astype(np.uint32) for x in (a, b)]
    for i, make in ((16, lambda x: x.view(np.float16)), (17, lambda x: from_bf16(x.view(np.uint16)))):
        with np.errstate(invalid="ignore"):
            larger = np.fmax(abs(make(a)), abs(make(b)))
        np.testing.assert_array_equal(abs(make(out[i])), larger)
    np.testing.assert_array_equal(out[18], a.max())
    np.testing.assert_array_equal(out[14], (bytes_[0] * bytes_[1]).sum(1, dtype=np.uint32) + c)

    kernel((1, 1), 32, 0, [out, floats[0], floats[1], c])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out[5].view(np.float16).reshape(32, 2).T, floats.astype(np.float16))
    np.testing.assert_array_equal(out[6].view(np.uint16).reshape(32, 2).T, to_bf16(floats))
    assert (np.abs(floats) > 65504).any()
    finite = np.clip(floats, -65504, 65504).astype(np.float16)
    np.testing.assert_array_equal(out[15].view(np.float16).reshape(32, 2).T, finite)


def test_functions() -> None:
    x = np.linspace(-30, 30, 32, dtype=np.float32)
    x[0] = 2.0**-130
    out = np.zeros((3, 32), np.float32)
    kernel = EmulatedKernel(SOURCE, "functions")
    kernel((1, 1), 32, 0, [out, x])
    np.testing.assert_allclose(out[0], np.exp2(x), rtol=1e-6)
    np.testing.assert_allclose(out[1, 1:], np.log2(np.abs(x[1:])), rtol=1e-5, atol=1e-6)
    assert out[1, 0] == -np.inf, "what is too small for a normal number counts as nothing"
    assert (out[2] == 0).all()
    x[7] = 1
    kernel((1, 1), 32, 0, [out, x])
    assert (out[2] == -np.inf).all()


@pytest.mark.parametrize("mode", [0, EARLY | DESCENDING])
def test_lanes_that_do_not_meet_are_an_error(mode: int) -> None:
    out = np.zeros(1, np.uint32)
    with pytest.raises(RuntimeError, match=r"waits for others at sync_warp"):
        EmulatedKernel(SOURCE, "parted")((1, 1), 32, 0, [out], mode)
    assert out[0] == 0


def test_leaving_shared_memory_is_an_error() -> None:
    out, x = np.zeros(544, np.uint32), np.zeros((4, 8, 8), np.uint16)
    with pytest.raises(RuntimeError, match="out of shared memory's bounds"):
        EmulatedKernel(SOURCE, "matrices")((1, 1), 32, 256, [out, x])


@pytest.mark.parametrize("mode", [0, DESCENDING])
def test_what_is_announced_without_a_wait_for_the_kernel_ahead_is_an_error(mode: int) -> None:
    out = np.zeros(64, np.uint32)
    EmulatedKernel(SOURCE, "announced")((2, 1), 32, 0, [out], mode)
    np.testing.assert_array_equal(out, np.tile(np.arange(32), 2))
    lane = 31 if mode == DESCENDING else 16
    with pytest.raises(RuntimeError, match=rf"lane {lane}: .*has not waited for the kernel ahead"):
        EmulatedKernel(SOURCE, "announced", {"WITHOUT_WAIT": 1})((2, 1), 32, 0, [out], mode)
