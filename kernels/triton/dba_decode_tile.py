"""Tiles of a stored stream for decode attention: numbers, or blocks made into numbers in registers.

A stream is read in one of three modes. `whole`: the tile [BN, P] of its D features, padded to P. `halves`: of 4-bit
blocks that begin where a head does, the low and the high nibbles are two tiles [BN, P/2], each its own dot, so that
nothing is shuffled; tile 0 has features e(j) = j // (E/2) * E + j % (E/2), tile 1 those E/2 further. The packed
instructions below need a GPU; every one has a plain form, which also serves the interpreter and float32. They are
declared impure, which they are not: else the compiler runs them twice for a latent, once in the layout of each dot,
and then cannot fetch the bytes ahead.
"""

import triton
import triton.language as tl

# Quantiles of the normal distribution (Dettmers et al., 2023, arXiv:2305.14314), as in caramba.ops.formats.
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# The levels' sixteen bits, level i in element i (round to nearest even).
NF4_BITS = {
    "bf16": (
        *(0xBF80, 0xBF32, 0xBF06, 0xBECA, 0xBE92, 0xBE3D, 0xBDBA, 0x0000),
        *(0x3DA3, 0x3E25, 0x3E7C, 0x3EAD, 0x3EE2, 0x3F10, 0x3F39, 0x3F80),
    ),
    "f16": (
        *(0xBC00, 0xB992, 0xB833, 0xB652, 0xB48D, 0xB1EA, 0xADD4, 0x0000),
        *(0x2D18, 0x3126, 0x33E0, 0x3568, 0x370D, 0x3880, 0x39C9, 0x3C00),
    ),
}
# 2^7 + n in bfloat16 and 2^10 + n in float16 have the nibble n as low bits under this byte.
MAGIC = {"bf16": (0x43, 0x3F803F80, 0xC308C308), "f16": (0x64, 0x3C003C00, 0xE408E408)}


def _q4_numbers(kind: str, nibbles: str, outs: tuple[str, str], scales: tuple[str, str]) -> str:
    """Four nibbles, one a byte, to (n - 8) * scale: exact up to the product."""
    lines = []
    for out, scale, selector in zip(outs, scales, ("0x4140", "0x4342"), strict=True):
        lines += [
            f"prmt.b32 w, {nibbles}, magic, {selector};",
            f"fma.rn.{kind}x2 w, w, one, bias;",
            f"fma.rn.{kind}x2 {out}, w, {scale}, zero;",
        ]
    return "\n".join(lines)


def _q4_head(kind: str) -> str:
    byte, one, bias = MAGIC[kind]
    return (
        ".reg .b32 l, h, w, magic, one, bias, zero;\n"
        f"mov.b32 magic, {byte * 0x01010101:#x}; mov.b32 one, {one:#x}; mov.b32 bias, {bias:#x};\n"
        "mov.b32 zero, 0x80008000;\n"
    )


def _q4_halves(kind: str) -> str:
    low = "and.b32 l, $4, 0x0f0f0f0f;\n" + _q4_numbers(kind, "l", ("$0", "$1"), ("$5", "$6"))
    high = "shr.u32 h, $4, 4;\nand.b32 h, h, 0x0f0f0f0f;\n" + _q4_numbers(
        kind, "h", ("$2", "$3"), ("$5", "$6")
    )
    return "{\n" + _q4_head(kind) + low + "\n" + high + "\n}"


def _q4_shifted(kind: str) -> str:
    take = "shr.u32 l, $2, $3;\nand.b32 l, l, 0x0f0f0f0f;\n"
    return "{\n" + _q4_head(kind) + take + _q4_numbers(kind, "l", ("$0", "$1"), ("$7", "$8")) + "\n}"


def _nf4_head(kind: str) -> str:
    """Tables of the levels' low and high bytes, four to a register."""
    lines = [".reg .b32 l, h, w, x, y, s, t, p, q, zero;", "mov.b32 zero, 0x80008000;"]
    for plane, shift in (("a", 0), ("b", 8)):
        for i in range(4):
            word = sum(((NF4_BITS[kind][4 * i + j] >> shift) & 0xFF) << (8 * j) for j in range(4))
            lines.append(f".reg .b32 {plane}{i}; mov.b32 {plane}{i}, {word:#x};")
    return "\n".join(lines) + "\n"


def _nf4_look_up(word: str) -> str:
    """Four nibbles in the low half of a word to their levels' low bytes in p and high bytes in q."""
    return "\n".join(
        (
            f"and.b32 s, {word}, 0x7777;",
            f"shr.u32 t, {word}, 1;",
            "and.b32 t, t, 0x4444;",
            "or.b32 t, t, 0x3210;",
            "prmt.b32 x, a0, a1, s;\nprmt.b32 y, a2, a3, s;\nprmt.b32 p, x, y, t;",
            "prmt.b32 x, b0, b1, s;\nprmt.b32 y, b2, b3, s;\nprmt.b32 q, x, y, t;",
            "",
        )
    )


def _nf4_halves(kind: str) -> str:
    def pair(outs: tuple[str, str], scale: str) -> str:
        # Nibbles alternate low, high: the even ones are tile 0's, the odd ones tile 1's.
        return "".join(
            f"prmt.b32 w, p, q, {selector};\nfma.rn.{kind}x2 {out}, w, {scale}, zero;\n"
            for out, selector in zip(outs, ("0x6240", "0x7351"), strict=True)
        )

    first = _nf4_look_up("$4") + pair(("$0", "$2"), "$5")
    second = "shr.u32 h, $4, 16;\n" + _nf4_look_up("h") + pair(("$1", "$3"), "$6")
    return "{\n" + _nf4_head(kind) + first + second + "}"


def _nf4_shifted(kind: str) -> str:
    # Four bytes of one nibble each become the four nibbles of a half word.
    gather = (
        "shr.u32 l, $2, $3;\nand.b32 l, l, 0x0f0f0f0f;\nshr.u32 h, l, 4;\nor.b32 l, l, h;\n"
        "prmt.b32 l, l, zero, 0x2020;\n"
    )
    numbers = "".join(
        f"prmt.b32 w, p, q, {selector};\nfma.rn.{kind}x2 ${i}, w, ${7 + i}, zero;\n"
        for i, selector in enumerate(("0x5140", "0x7362"))
    )
    return "{\n" + _nf4_head(kind) + gather + _nf4_look_up("l") + numbers + "}"


def _q8(kind: str) -> str:
    """Four signed bytes q: 2^15 + (q + 128) in float32 has the byte q + 128 as its second.

    Times a scale, less (2^15 + 128) scales, that is q scales, exact up to one rounding: the subtrahend has 20 bits.
    """
    lines = [
        ".reg .b32 u, m; .reg .f32 f0, f1, f2, f3;",
        "xor.b32 u, $2, 0x80808080;",
        "mov.b32 m, 0x47000000;",
    ]
    for i in range(4):
        lines += [
            f".reg .b32 w{i}; prmt.b32 w{i}, u, m, 0x74{i}4;",
            f"mov.b32 f{i}, w{i};",
            f"fma.rn.f32 f{i}, f{i}, ${3 + i}, ${7 + i};",
        ]
    lines += [f"cvt.rn.{kind}x2.f32 ${i}, f{2 * i + 1}, f{2 * i};" for i in range(2)]
    return "{\n" + "\n".join(lines) + "\n}"


HALVES = {(kind, ty): make(ty) for kind, make in (("q4_0", _q4_halves), ("nf4", _nf4_halves)) for ty in MAGIC}
WHOLE = {
    (kind, ty): make(ty)
    for kind, make in (("q8_0", _q8), ("q4_0", _q4_shifted), ("nf4", _nf4_shifted))
    for ty in MAGIC
}
LEVELS = tl.constexpr(NF4_LEVELS)
Q8_SHIFT = tl.constexpr(-(2.0**15) - 128.0)


@triton.constexpr_function
def halves_asm(kind, dtype):
    """Return the instructions from four bytes to two tiles' numbers."""
    return HALVES[kind, "bf16" if dtype == tl.bfloat16 else "f16"]


@triton.constexpr_function
def whole_asm(kind, dtype):
    """Return the instructions from four bytes to one tile's numbers."""
    return WHOLE[kind, "bf16" if dtype == tl.bfloat16 else "f16"]


@triton.jit
def level(code):
    """Return the NormalFloat levels of codes 0..15, by four selections of a bit each."""
    b0, b1, b2, b3 = (code & 1) != 0, (code & 2) != 0, (code & 4) != 0, (code & 8) != 0
    v0, v1 = tl.where(b0, LEVELS[1], LEVELS[0]), tl.where(b0, LEVELS[3], LEVELS[2])
    v2, v3 = tl.where(b0, LEVELS[5], LEVELS[4]), tl.where(b0, LEVELS[7], LEVELS[6])
    v4, v5 = tl.where(b0, LEVELS[9], LEVELS[8]), tl.where(b0, LEVELS[11], LEVELS[10])
    v6, v7 = tl.where(b0, LEVELS[13], LEVELS[12]), tl.where(b0, LEVELS[15], LEVELS[14])
    low = tl.where(b2, tl.where(b1, v3, v2), tl.where(b1, v1, v0))
    high = tl.where(b2, tl.where(b1, v7, v6), tl.where(b1, v5, v4))
    return tl.where(b3, high, low)


@triton.jit
def scaled_code(code, scale, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return scale times what 4-bit codes mean, in float32 until the end."""
    if KIND == "nf4":
        number = level(code.to(tl.int32))
    else:
        number = code.to(tl.float32) - 8.0
    return (number * scale.to(tl.float32)).to(DTYPE)


@triton.jit
def columns(D: tl.constexpr, P: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr):
    """Return the features that a tile's columns hold: tile HALF of two, or all of them (HALF = -1)."""
    if HALF == -1:
        d = tl.arange(0, P)
    else:
        j = tl.arange(0, P // 2)
        d = j // (E // 2) * E + j % (E // 2) + HALF * (E // 2)
    return d


@triton.jit
def numbers(
    x, s_n, n, ok, D: tl.constexpr, P: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, MASKED: tl.constexpr
):
    """Load tokens n of a head's numbers, zeros where not ok and beyond D."""
    d = columns(D, P, E, HALF)
    at = x + n[:, None] * s_n + d[None, :]
    if MASKED:
        tile = tl.load(at, ok[:, None] & (d < D)[None, :], other=0.0)
    elif P == D:
        tile = tl.load(at)
    else:
        tile = tl.load(at, (d < D)[None, :], other=0.0)
    return tile


@triton.jit
def scales(
    x,
    s_plane,
    s_n,
    n,
    ok,
    first,
    D: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    SPREAD: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load each element's scale, [BN, WIDTH]: SPREAD of them a token, or (SPREAD = 0) looked up one by one."""
    if SPREAD == 1:
        at = x + first // E * s_plane + n * s_n
        if MASKED:
            one = tl.load(at, ok, other=0.0)
        else:
            one = tl.load(at)
        spread = tl.broadcast_to(one.to(DTYPE)[:, None], (n.shape[0], WIDTH))
    elif SPREAD > 1:
        block = tl.arange(0, SPREAD)
        at = x + (first // E + block)[None, :] * s_plane + n[:, None] * s_n
        if MASKED:
            some = tl.load(at, ok[:, None] & (block * E < D)[None, :], other=0.0)
        elif D == P:
            some = tl.load(at)
        else:
            some = tl.load(at, (block * E < D)[None, :], other=0.0)
        wide = tl.broadcast_to(some.to(DTYPE)[:, :, None], (n.shape[0], SPREAD, WIDTH // SPREAD))
        spread = tl.reshape(wide, (n.shape[0], WIDTH))
    else:
        d = tl.arange(0, P)
        at = x + ((first + d) // E)[None, :] * s_plane + n[:, None] * s_n
        spread = tl.load(at, ok[:, None] & (d < D)[None, :], other=0.0).to(DTYPE)
    return spread


@triton.jit
def blocks(
    codes,
    c_plane,
    c_n,
    scale,
    s_plane,
    s_n,
    n,
    ok,
    first,
    KIND: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    E: tl.constexpr,
    SPREAD: tl.constexpr,
    HALVED: tl.constexpr,
    UNIFORM: tl.constexpr,
    DTYPE: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return tokens n of a head's blocks as numbers, two tiles where HALVED (else the same one twice).

    `first` is the head's first feature in a token's row. UNIFORM: a head is in one nibble of its bytes.
    """
    if HALVED:
        j = tl.arange(0, P // 2)
        at = (
            codes
            + (first // E + j // (E // 2))[None, :] * c_plane
            + n[:, None] * c_n
            + (j % (E // 2))[None, :]
        )
        held = j // (E // 2) * E < D
        if MASKED:
            byte = tl.load(at, ok[:, None] & held[None, :], other=0)
        elif D == P:
            byte = tl.load(at)
        else:
            byte = tl.load(at, held[None, :], other=0)
        if PACKED_MATH:
            s = scales(scale, s_plane, s_n, n, ok, first, D, P, E, SPREAD, P // 2, DTYPE, MASKED)
            asm: tl.constexpr = halves_asm(KIND, DTYPE)
            if DTYPE == tl.bfloat16:
                low, high = tl.inline_asm_elementwise(
                    asm,
                    "=&r,=&r,=&r,=&r,r,r,r",
                    [byte, s],
                    dtype=(tl.bfloat16, tl.bfloat16),
                    is_pure=False,
                    pack=4,
                )
            else:
                low, high = tl.inline_asm_elementwise(
                    asm,
                    "=&r,=&r,=&r,=&r,r,r,r",
                    [byte, s],
                    dtype=(tl.float16, tl.float16),
                    is_pure=False,
                    pack=4,
                )
        else:
            s = scales(scale, s_plane, s_n, n, ok, first, D, P, E, SPREAD, P // 2, tl.float32, MASKED)
            low, high = scaled_code(byte & 15, s, KIND, DTYPE), scaled_code(byte >> 4, s, KIND, DTYPE)
    else:
        e = first + tl.arange(0, P)
        held = tl.arange(0, P) < D
        half: tl.constexpr = E if KIND == "q8_0" else E // 2
        at = codes + (e // E)[None, :] * c_plane + n[:, None] * c_n + (e % half)[None, :]
        if MASKED:
            byte = tl.load(at, ok[:, None] & held[None, :], other=0)
        elif D == P:
            byte = tl.load(at)
        else:
            byte = tl.load(at, held[None, :], other=0)
        shift = (e % E // half * 4)[None, :]
        if KIND == "q8_0":
            s = scales(scale, s_plane, s_n, n, ok, first, D, P, E, SPREAD, P, tl.float32, MASKED)
            if PACKED_MATH:
                asm: tl.constexpr = whole_asm(KIND, DTYPE)
                shift_by = s * Q8_SHIFT
                if DTYPE == tl.bfloat16:
                    low = tl.inline_asm_elementwise(
                        asm, "=&r,=&r,r,f,f,f,f,f,f,f,f", [byte, s, shift_by], tl.bfloat16, False, 4
                    )
                else:
                    low = tl.inline_asm_elementwise(
                        asm, "=&r,=&r,r,f,f,f,f,f,f,f,f", [byte, s, shift_by], tl.float16, False, 4
                    )
            else:
                low = (byte.to(tl.float32) * s).to(DTYPE)
        elif PACKED_MATH and UNIFORM:
            s = scales(scale, s_plane, s_n, n, ok, first, D, P, E, SPREAD, P, DTYPE, MASKED)
            asm: tl.constexpr = whole_asm(KIND, DTYPE)
            place = tl.zeros([n.shape[0], P], tl.int32) + first % E // half * 4
            if DTYPE == tl.bfloat16:
                low = tl.inline_asm_elementwise(
                    asm, "=&r,=&r,r,r,r,r,r,r,r", [byte, place, s], tl.bfloat16, False, 4
                )
            else:
                low = tl.inline_asm_elementwise(
                    asm, "=&r,=&r,r,r,r,r,r,r,r", [byte, place, s], tl.float16, False, 4
                )
        else:
            s = scales(scale, s_plane, s_n, n, ok, first, D, P, E, SPREAD, P, tl.float32, MASKED)
            low = scaled_code((byte.to(tl.int32) >> shift) & 15, s, KIND, DTYPE)
        high = low
    return low, high
