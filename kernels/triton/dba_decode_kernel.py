"""Split-K decode attention on stored streams: tiles of a stream, shares of the splits, and the kernel that joins them.

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
    high = "shr.u32 h, $4, 4;\nand.b32 h, h, 0x0f0f0f0f;\n" + _q4_numbers(kind, "h", ("$2", "$3"), ("$5", "$6"))
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
    (kind, ty): make(ty) for kind, make in (("q8_0", _q8), ("q4_0", _q4_shifted), ("nf4", _nf4_shifted)) for ty in MAGIC
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
def numbers(x, s_n, n, ok, D: tl.constexpr, P: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr, MASKED: tl.constexpr):
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
        at = codes + (first // E + j // (E // 2))[None, :] * c_plane + n[:, None] * c_n + (j % (E // 2))[None, :]
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
                low = tl.inline_asm_elementwise(asm, "=&r,=&r,r,r,r,r,r,r,r", [byte, place, s], tl.bfloat16, False, 4)
            else:
                low = tl.inline_asm_elementwise(asm, "=&r,=&r,r,r,r,r,r,r,r", [byte, place, s], tl.float16, False, 4)
        else:
            s = scales(scale, s_plane, s_n, n, ok, first, D, P, E, SPREAD, P, tl.float32, MASKED)
            low = scaled_code((byte.to(tl.int32) >> shift) & 15, s, KIND, DTYPE)
        high = low
    return low, high


@triton.jit
def share(start, held, length, split, n_splits, BLOCK_TOKENS: tl.constexpr, HAS_TAIL: tl.constexpr):
    """Return the token ranges of a split: low to until in the blocks, then first to high in the tail.

    Whole tiles are shared out, no split getting two more than another: of 131,072 tokens by 33 splits all but one get
    31 tiles of 128; as many for each as the largest share would leave a split without any. A tail is read by a loop of
    its own, whose waits come on top. Where that makes no split's share longer, the last split reads the tail and nothing
    else. Elsewhere, and where there is one split, all tokens are shared out alike. A range is empty where its end is not
    behind its begin.
    """
    tiles = tl.cdiv(tl.maximum(length - start, 0), BLOCK_TOKENS)
    sharers = n_splits
    if HAS_TAIL:
        n_others = n_splits - 1
        behind = tl.maximum(held, start)
        of_blocks = tl.cdiv(tl.maximum(held - start, 0), BLOCK_TOKENS)
        most = tl.maximum(tl.cdiv(of_blocks, tl.maximum(n_others, 1)) * BLOCK_TOKENS, length - behind)
        is_apart = (n_others > 0) & (length > behind) & (most <= tl.cdiv(tiles, n_splits) * BLOCK_TOKENS)
        tiles = tl.where(is_apart, of_blocks, tiles)
        sharers = tl.where(is_apart, n_others, n_splits)
    fewest, rest = tiles // sharers, tiles % sharers
    low = start + (split * fewest + tl.minimum(split, rest)) * BLOCK_TOKENS
    high = tl.minimum(low + (fewest + tl.where(split < rest, 1, 0)) * BLOCK_TOKENS, length)
    until, first = tl.minimum(high, held), tl.maximum(low, held)
    if HAS_TAIL:
        has_tail = is_apart & (split == n_others)
        until = tl.where(has_tail, low, until)
        first = tl.where(is_apart, tl.where(has_tail, behind, length), first)
        high = tl.where(is_apart, length, high)
    return low, until, first, high


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def queries(q, row, ok, STREAM: tl.constexpr):
    """Load the queries at offsets `row` as the stream's tiles are laid out; both the same where it has one."""
    D: tl.constexpr = STREAM[1]
    P: tl.constexpr = STREAM[2]
    E: tl.constexpr = STREAM[3]
    HALVED: tl.constexpr = STREAM[5]
    HALF: tl.constexpr = 0 if HALVED else -1
    d = columns(D, P, E, HALF)
    first = tl.load(q + row[:, None] + d[None, :], ok[:, None] & (d < D)[None, :], other=0.0)
    if HALVED:
        d = columns(D, P, E, 1)
        second = tl.load(q + row[:, None] + d[None, :], ok[:, None] & (d < D)[None, :], other=0.0)
    else:
        second = first
    return first, second


@triton.jit
def tokens(
    x,
    s_plane,
    s_n,
    scale,
    z_plane,
    z_n,
    i,
    n,
    ok,
    head,
    STREAM: tl.constexpr,
    IS_NUMBERS: tl.constexpr,
    DTYPE: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load tokens i + n of a head, from numbers (an exact stream, or a tail) or from blocks."""
    KIND: tl.constexpr = STREAM[0]
    D: tl.constexpr = STREAM[1]
    P: tl.constexpr = STREAM[2]
    E: tl.constexpr = STREAM[3]
    SPREAD: tl.constexpr = STREAM[4]
    HALVED: tl.constexpr = STREAM[5]
    UNIFORM: tl.constexpr = STREAM[6]
    i = tl.full([], i, tl.int64)
    x += i * s_n
    if IS_NUMBERS:
        if HALVED:
            low = numbers(x, s_n, n, ok, D, P, E, 0, MASKED).to(DTYPE)
            high = numbers(x, s_n, n, ok, D, P, E, 1, MASKED).to(DTYPE)
        else:
            low = numbers(x, s_n, n, ok, D, P, E, -1, MASKED).to(DTYPE)
            high = low
    else:
        at = scale + i * z_n
        low, high = blocks(x, s_plane, s_n, at, z_plane, z_n, n, ok, head * D, KIND, D, P, E, SPREAD, HALVED, UNIFORM, DTYPE, PACKED_MATH, MASKED)  # fmt: skip
    return low, high


@triton.jit
def attend(
    q_sem,
    q_sem_2,
    q_geo,
    q_geo_2,
    sem,
    sem_2,
    geo,
    geo_2,
    v,
    v_2,
    seen,
    m,
    l,
    acc,
    acc_2,
    SEM_HALVED: tl.constexpr,
    GEO_HALVED: tl.constexpr,
    V_HALVED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take a tile of tokens into the running maximum m, sum l and weighted values, in base-2 logarithms."""
    s = tl.dot(q_sem, tl.trans(sem), input_precision="ieee")
    g = tl.dot(q_geo, tl.trans(geo), input_precision="ieee")
    if SEM_HALVED:
        s += tl.dot(q_sem_2, tl.trans(sem_2), input_precision="ieee")
    if GEO_HALVED:
        g += tl.dot(q_geo_2, tl.trans(geo_2), input_precision="ieee")
    s = (s + g) * LOG2_E
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1))
    finite = tl.where(top == -float("inf"), 0.0, top)  # -inf minus -inf where nothing has been seen
    p = tl.exp2(s - finite[:, None])
    a = tl.exp2(m - finite)
    l = l * a + tl.sum(p, 1)
    p = p.to(v.dtype)
    acc = acc * a[:, None] + tl.dot(p, v, input_precision="ieee")
    if V_HALVED:
        acc_2 = acc_2 * a[:, None] + tl.dot(p, v_2, input_precision="ieee")
    return top, l, acc, acc_2


@triton.jit
def split_kv_kernel(
    q_sem,
    q_geo,
    sem,
    geo,
    v,
    sem_scale,
    geo_scale,
    v_scale,
    sem_tail,
    geo_tail,
    v_tail,
    seqlens,
    packed,
    out,
    sums,
    qs_b,
    qs_h,
    qs_t,
    qg_b,
    qg_h,
    qg_t,
    sem_b,
    sem_k,
    sem_n,
    geo_b,
    geo_k,
    geo_n,
    v_b,
    v_k,
    v_n,
    sem_zb,
    sem_zk,
    sem_zn,
    geo_zb,
    geo_zk,
    geo_zn,
    v_zb,
    v_zk,
    v_zn,
    sem_tb,
    sem_tk,
    sem_tn,
    geo_tb,
    geo_tk,
    geo_tn,
    v_tb,
    v_tk,
    v_tn,
    packed_b,
    capacity,
    packed_capacity,
    tail_capacity,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    SEM: tl.constexpr,
    GEO: tl.constexpr,
    V: tl.constexpr,
    LATENT: tl.constexpr,
    HAS_PACKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    ANNOUNCED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One split of one sequence's key/value head, for BLOCK_ROWS of its GROUP * QUERIES queries.

    SEM, GEO and V describe a stream: (KIND, D, P, E, SPREAD, HALVED, UNIFORM), see `columns`. Numbers
    have strides (b, head, token), blocks (b, plane, token). With FINAL there is one split and no other kernel. With
    ANNOUNCED the kernel that joins may begin when every program has read its tokens; it waits there for what they store.
    EARLY it may itself begin before the kernel ahead has ended, whose numbers it waits for.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    DTYPE: tl.constexpr = q_sem.dtype.element_ty
    pid = tl.program_id(0)
    rows = pid % ROW_BLOCKS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = pid // ROW_BLOCKS % KV_HEADS
    b = (pid // ROW_BLOCKS // KV_HEADS).to(tl.int64)
    split, n_splits = tl.program_id(1), tl.num_programs(1)
    is_row = rows < GROUP * QUERIES
    h, t = head * GROUP + rows // QUERIES, rows % QUERIES

    length = tl.minimum(tl.load(seqlens + b), capacity)
    if HAS_PACKED:
        held = tl.maximum(tl.minimum(tl.load(packed + b * packed_b), packed_capacity), 0)
        length = tl.minimum(length, held + tail_capacity)
        held = tl.minimum(held, length)
    else:
        held = length
    end = length - QUERIES + 1 + t  # tokens that each row sees
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - QUERIES + 1 - window, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    low, until, first, high = share(start, held, length, split, n_splits, BLOCK_TOKENS, HAS_PACKED)

    qs_row = b * qs_b + h * qs_h + t * qs_t
    qg_row = b * qg_b + h * qg_h + t * qg_t
    qs, qs_2 = queries(q_sem, qs_row, is_row, SEM)
    qg, qg_2 = queries(q_geo, qg_row, is_row, GEO)

    far = head.to(tl.int64)
    sem += b * sem_b
    geo += b * geo_b
    v += b * v_b
    SEM_NUMBERS: tl.constexpr = SEM[0] == "exact"
    if SEM_NUMBERS:
        sem += far * sem_k
    else:
        sem_scale += b * sem_zb
    GEO_NUMBERS: tl.constexpr = GEO[0] == "exact"
    if GEO_NUMBERS:
        geo += far * geo_k
    else:
        geo_scale += b * geo_zb
    V_NUMBERS: tl.constexpr = V[0] == "exact"
    if V_NUMBERS:
        v += far * v_k
    else:
        v_scale += b * v_zb

    V_P: tl.constexpr = V[2]
    V_HALVED: tl.constexpr = V[5]
    WIDTH: tl.constexpr = V_P // 2 if V_HALVED else V_P
    m = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
    acc_2 = tl.zeros([BLOCK_ROWS, WIDTH if V_HALVED else 1], tl.float32)
    n = tl.arange(0, BLOCK_TOKENS)

    # Blocks of quantised streams, numbers of exact ones: whole tiles first, without masks on the loads, whose
    # token axis is that along which scales are contiguous.
    CUT: tl.constexpr = HAS_WINDOW or QUERIES > 1
    middle = low + tl.maximum(until - low, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    for i in tl.range(low, middle, BLOCK_TOKENS):
        ok = n >= 0
        s0, s1 = tokens(sem, sem_k, sem_n, sem_scale, sem_zk, sem_zn, i, n, ok, head, SEM, SEM_NUMBERS, DTYPE, PACKED_MATH, False)  # fmt: skip
        g0, g1 = tokens(geo, geo_k, geo_n, geo_scale, geo_zk, geo_zn, i, n, ok, head, GEO, GEO_NUMBERS, DTYPE, PACKED_MATH, False)  # fmt: skip
        if LATENT:
            v0, v1 = s0, s1
        else:
            v0, v1 = tokens(v, v_k, v_n, v_scale, v_zk, v_zn, i, n, ok, head, V, V_NUMBERS, DTYPE, PACKED_MATH, False)  # fmt: skip
        seen = (i + n)[None, :] < end[:, None]
        if HAS_WINDOW:
            seen = seen & ((i + n)[None, :] >= end[:, None] - window)
        m, l, acc, acc_2 = attend(qs, qs_2, qg, qg_2, s0, s1, g0, g1, v0, v1, seen, m, l, acc, acc_2, SEM[5], GEO[5], V[5], CUT)  # fmt: skip
    for i in tl.range(middle, until, BLOCK_TOKENS, num_stages=1):
        ok = i + n < until
        s0, s1 = tokens(sem, sem_k, sem_n, sem_scale, sem_zk, sem_zn, i, n, ok, head, SEM, SEM_NUMBERS, DTYPE, PACKED_MATH, True)  # fmt: skip
        g0, g1 = tokens(geo, geo_k, geo_n, geo_scale, geo_zk, geo_zn, i, n, ok, head, GEO, GEO_NUMBERS, DTYPE, PACKED_MATH, True)  # fmt: skip
        if LATENT:
            v0, v1 = s0, s1
        else:
            v0, v1 = tokens(v, v_k, v_n, v_scale, v_zk, v_zn, i, n, ok, head, V, V_NUMBERS, DTYPE, PACKED_MATH, True)  # fmt: skip
        seen = ok[None, :] & ((i + n)[None, :] < end[:, None])
        if HAS_WINDOW:
            seen = seen & ((i + n)[None, :] >= end[:, None] - window)
        m, l, acc, acc_2 = attend(qs, qs_2, qg, qg_2, s0, s1, g0, g1, v0, v1, seen, m, l, acc, acc_2, SEM[5], GEO[5], V[5], True)  # fmt: skip
    if HAS_PACKED:
        # Tokens of quantised streams that are still in 16 bits; the tail has its own positions from 0.
        if not SEM_NUMBERS:
            sem_tail += b * sem_tb + head * sem_tk
        if not GEO_NUMBERS:
            geo_tail += b * geo_tb + head * geo_tk
        if not V_NUMBERS:
            v_tail += b * v_tb + head * v_tk
        for i in tl.range(first, high, BLOCK_TOKENS, num_stages=1):
            ok = i + n < high
            if not SEM_NUMBERS:
                s0, s1 = tokens(sem_tail, 0, sem_tn, sem_tail, 0, 0, i - held, n, ok, 0, SEM, True, DTYPE, False, True)  # fmt: skip
            else:
                s0, s1 = tokens(sem, 0, sem_n, sem, 0, 0, i, n, ok, 0, SEM, True, DTYPE, False, True)  # fmt: skip
            if not GEO_NUMBERS:
                g0, g1 = tokens(geo_tail, 0, geo_tn, geo_tail, 0, 0, i - held, n, ok, 0, GEO, True, DTYPE, False, True)  # fmt: skip
            else:
                g0, g1 = tokens(geo, 0, geo_n, geo, 0, 0, i, n, ok, 0, GEO, True, DTYPE, False, True)  # fmt: skip
            if LATENT:
                v0, v1 = s0, s1
            elif not V_NUMBERS:
                v0, v1 = tokens(v_tail, 0, v_tn, v_tail, 0, 0, i - held, n, ok, 0, V, True, DTYPE, False, True)  # fmt: skip
            else:
                v0, v1 = tokens(v, 0, v_n, v, 0, 0, i, n, ok, 0, V, True, DTYPE, False, True)  # fmt: skip
            seen = ok[None, :] & ((i + n)[None, :] < end[:, None])
            if HAS_WINDOW:
                seen = seen & ((i + n)[None, :] >= end[:, None] - window)
            m, l, acc, acc_2 = attend(qs, qs_2, qg, qg_2, s0, s1, g0, g1, v0, v1, seen, m, l, acc, acc_2, SEM[5], GEO[5], V[5], True)  # fmt: skip

    if ANNOUNCED:
        tl.extra.cuda.gdc_launch_dependents()
    some = l > 0
    total = tl.where(some, l, 1.0)
    inverse = (1.0 / total)[:, None]  # a division each takes as many instructions as all else that comes here
    # Rows of the output are [B, H, QUERIES], those of the parts [B, H, QUERIES, splits].
    row = (b * KV_HEADS * GROUP + h) * QUERIES + t
    if FINAL:
        tl.store(sums + row, tl.where(some, (m + tl.log2(total)) * LN_2, -float("inf")), is_row)
    else:
        row = row * n_splits + split
        tl.store(sums + row, tl.where(some, m + tl.log2(total), -float("inf")), is_row)
    row = row * V[1]
    HALF: tl.constexpr = 0 if V_HALVED else -1
    d = columns(V[1], V_P, V[3], HALF)
    kept = is_row[:, None] & (d < V[1])[None, :]
    tl.store(out + row[:, None] + d[None, :], (acc * inverse).to(out.dtype.element_ty), kept)
    if V_HALVED:
        d = columns(V[1], V_P, V[3], 1)
        kept = is_row[:, None] & (d < V[1])[None, :]
        tl.store(out + row[:, None] + d[None, :], (acc_2 * inverse).to(out.dtype.element_ty), kept)


@triton.jit
def combine_kernel(
    parts, part_sums, q_sem, q_geo, null_sem, null_geo, null_v, out, sums, qs_b, qs_h, qs_t, qg_b, qg_h, qg_t, n_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DS: tl.constexpr, DG: tl.constexpr, DV: tl.constexpr,
    PS: tl.constexpr, PG: tl.constexpr, HAS_NULL: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Join the splits of one row, and the null key where there is one, for BLOCK of its DV features.

    With EARLY it begins while the splits end, and waits until all that they stored can be read.
    """
    row = tl.program_id(0).to(tl.int64)
    h, t = row // QUERIES % HEADS, row % QUERIES
    b = row // QUERIES // HEADS
    split = tl.arange(0, SPLITS)
    is_split = split < n_splits
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    # Both loads before the first is used, so that they are in flight together.
    l = tl.load(part_sums + row * n_splits + split, is_split, other=-float("inf"))
    at = (row * n_splits + split)[:, None] * DV + d[None, :]
    part = tl.load(parts + at, is_split[:, None] & (d < DV)[None, :], other=0.0).to(tl.float32)
    top = tl.max(l, 0)
    if HAS_NULL:
        i, j = tl.arange(0, PS), tl.arange(0, PG)
        key = h // GROUP
        qs = tl.load(q_sem + b * qs_b + h * qs_h + t * qs_t + i, i < DS, other=0.0).to(tl.float32)
        qg = tl.load(q_geo + b * qg_b + h * qg_h + t * qg_t + j, j < DG, other=0.0).to(tl.float32)
        ks = tl.load(null_sem + key * DS + i, i < DS, other=0.0).to(tl.float32)
        kg = tl.load(null_geo + key * DG + j, j < DG, other=0.0).to(tl.float32)
        own = (tl.sum(qs * ks, 0) + tl.sum(qg * kg, 0)) * LOG2_E
        top = tl.maximum(top, own)
    finite = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp2(l - finite)
    total = tl.sum(weight, 0)
    read = tl.sum(part * weight[:, None], 0)
    if HAS_NULL:
        weight_null = tl.exp2(own - finite)
        total += weight_null
        read += weight_null * tl.load(null_v + key * DV + d, d < DV, other=0.0).to(tl.float32)
    some = total > 0
    total = tl.where(some, total, 1.0)
    tl.store(out + row * DV + d, (read / total).to(out.dtype.element_ty), d < DV)
    if tl.program_id(1) == 0:
        tl.store(sums + row, tl.where(some, (finite + tl.log2(total)) * LN_2, -float("inf")))
