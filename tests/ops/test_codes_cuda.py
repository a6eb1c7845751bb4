"""What the latent kernel's instructions make of quantised codes, emulated on this host, against the formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caramba.ops.formats import NF4_LEVELS
from tests.ops.emulated import EmulatedKernel, needs_compiler

pytestmark = needs_compiler
SOURCE = Path(__file__).parent / "warp_emulator" / "pairs.cu"
FIELDS = {"q8_0": 2, "q4_0": 4, "nf4": 4}


def made(kind: str, words: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the numbers [N, 2 units, FIELDS] of words [N], each number with its unit's of two scales [N, 2]."""
    out = np.zeros((len(words), FIELDS[kind], 2), np.float16)
    args = [out, words, np.ascontiguousarray(scales.astype(np.float16)).view(np.uint32)[:, 0], len(words)]
    EmulatedKernel(SOURCE, "pairs", {"KIND": kind.upper()})((-(-len(words) // 32), 1), 32, 0, args)
    return out.astype(np.float64).transpose(0, 2, 1)


def drawn(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return words [N], and the nibbles [N, 2 units, 4] of each."""
    words = np.random.default_rng(0).integers(0, 1 << 32, n, dtype=np.uint32)
    return words, (words[:, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).reshape(n, 2, 4)


def test_levels_of_nf4() -> None:
    """Each nibble is its level wherever it stands; nothing is exact, and a scale of 4 leaves only the levels' error."""
    words, nibbles = drawn(2000)
    levels = np.array(NF4_LEVELS)
    found = made("nf4", words, np.full((len(words), 2), 4.0))
    error = found - levels[nibbles]
    by_level = np.array([np.unique(error[nibbles == n]) for n in range(16)])
    assert by_level.shape == (16, 1), "one number a level"
    assert by_level[7] == 0
    assert np.abs(by_level).max() < 0.0039
    assert np.sqrt((by_level**2).mean()) < 0.00175


@pytest.mark.parametrize("exponent", [-14, -8, 0, 15])
def test_scales_of_nf4(exponent: int) -> None:
    """Numbers are levels times scales, rounded once, also of small scales and of the largest."""
    words, _ = drawn(500)
    scales = np.random.default_rng(1).uniform(1, 2, (500, 2)).astype(np.float16).astype(np.float64)
    found = made("nf4", words, scales * 2.0**exponent)
    exact = made("nf4", words, np.ones((500, 2))) * scales[:, :, None] * 2.0**exponent
    assert (np.abs(found - exact) <= np.maximum(np.abs(exact) * 2.0**-11, 2.0**-25)).all()
