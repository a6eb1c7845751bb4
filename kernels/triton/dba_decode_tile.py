"""Tiles of a stored stream for decode attention: numbers, or blocks made into numbers in registers.

A tile is [BN, P]: the D features of a head, padded to P, of BN tokens. STREAM says how it is read: (KIND, D, P, E,
SPREAD, HALVED, UNIFORM) with E elements a block. HALVED: 4-bit blocks begin where a head does, so that the low nibbles
of a block's bytes are its first and the high ones its second half. UNIFORM: a head lies in one nibble of its bytes.
"""

from caramba.kernels.triton.dba_decode_codes import halves, singles

import triton
import triton.language as tl


@triton.jit
def numbers(x, s_n, n, ok, D: tl.constexpr, P: tl.constexpr, MASKED: tl.constexpr):
    """Load tokens n of a head's numbers, zeros where not ok and beyond D."""
    d = tl.arange(0, P)
    at = x + n[:, None] * s_n + d[None, :]
    if MASKED:
        tile = tl.load(at, ok[:, None] & (d < D)[None, :], other=0.0)
    elif P == D:
        tile = tl.load(at)
    else:
        tile = tl.load(at, (d < D)[None, :], other=0.0)
    return tile


@triton.jit
def codes(at, ok, held, IS_FULL: tl.constexpr, MASKED: tl.constexpr):
    """Load codes, zeros where not ok or not held."""
    if MASKED:
        byte = tl.load(at, ok[:, None] & held[None, :], other=0)
    elif IS_FULL:
        byte = tl.load(at)
    else:
        byte = tl.load(at, held[None, :], other=0)
    return byte


@triton.jit
def scales(x, s_plane, s_n, n, ok, first, STREAM: tl.constexpr, MASKED: tl.constexpr):
    """Load the scales of tokens n of a head: [BN], [BN, SPREAD], or one for each element [BN, P]."""
    D: tl.constexpr = STREAM[1]
    P: tl.constexpr = STREAM[2]
    E: tl.constexpr = STREAM[3]
    SPREAD: tl.constexpr = STREAM[4]
    if SPREAD == 1:
        at = x + first // E * s_plane + n * s_n
        if MASKED:
            found = tl.load(at, ok, other=0.0)
        else:
            found = tl.load(at)
    elif SPREAD > 1:
        block = tl.arange(0, SPREAD)
        at = x + (first // E + block)[None, :] * s_plane + n[:, None] * s_n
        found = codes(at, ok, block * E < D, D == P, MASKED)
    else:
        d = tl.arange(0, P)
        at = x + ((first + d) // E)[None, :] * s_plane + n[:, None] * s_n
        found = codes(at, ok, d < D, D == P, MASKED)
    return found


@triton.jit
def spread(scale, SPREAD: tl.constexpr, WIDTH: tl.constexpr):
    """Return the scale of each of WIDTH elements or bytes of a token."""
    if SPREAD == 1:
        wide = tl.broadcast_to(scale[:, None], (scale.shape[0], WIDTH))
    elif SPREAD > 1:
        each = tl.broadcast_to(scale[:, :, None], (scale.shape[0], SPREAD, WIDTH // SPREAD))
        wide = tl.reshape(each, (scale.shape[0], WIDTH))
    else:
        wide = scale
    return wide


@triton.jit
def blocks(
    x,
    c_plane,
    c_n,
    scale,
    n,
    ok,
    first,
    STREAM: tl.constexpr,
    DTYPE: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return tokens n of a head's blocks as numbers; `first` is the head's first feature in a token's row."""
    KIND: tl.constexpr = STREAM[0]
    D: tl.constexpr = STREAM[1]
    P: tl.constexpr = STREAM[2]
    E: tl.constexpr = STREAM[3]
    SPREAD: tl.constexpr = STREAM[4]
    HALVED: tl.constexpr = STREAM[5]
    UNIFORM: tl.constexpr = STREAM[6]
    IN_PACKS: tl.constexpr = PACKED_MATH and (HALVED or UNIFORM or KIND == "q8_0")
    HALF: tl.constexpr = E if KIND == "q8_0" else E // 2  # bytes of a block
    scale = scale.to(DTYPE if IN_PACKS else tl.float32)
    if HALVED:
        j = tl.arange(0, P // 2)
        at = x + (first // E + j // HALF)[None, :] * c_plane + n[:, None] * c_n + (j % HALF)[None, :]
        byte = codes(at, ok, j // HALF * E < D, D == P, MASKED)
        low, high = halves(byte, spread(scale, SPREAD, P // 2), KIND, DTYPE, IN_PACKS)
        both = tl.reshape(tl.join(low, high), (n.shape[0], P // E, HALF, 2))
        tile = tl.reshape(tl.permute(both, (0, 1, 3, 2)), (n.shape[0], P))
    else:
        e = first + tl.arange(0, P)
        at = x + (e // E)[None, :] * c_plane + n[:, None] * c_n + (e % HALF)[None, :]
        byte = codes(at, ok, tl.arange(0, P) < D, D == P, MASKED)
        if UNIFORM:
            place = first % E // HALF * 4
        else:
            place = (e % E // HALF * 4)[None, :]
        tile = singles(byte, place, spread(scale, SPREAD, P), KIND, DTYPE, IN_PACKS)
    return tile
