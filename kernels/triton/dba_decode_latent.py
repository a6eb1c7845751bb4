"""Split-K decode attention on a quantised latent and its geometric stream, whose codes go to products by words.

The rows of a program are tiles of ROW_TILE, each with products of its own: of wider tiles the compiler may divide the rows
among warps, and each warp would then make all codes to numbers.

As in `dba_decode_heads` field i of every word is a tile of its own, and codes go from shared memory to products without
another pass through it. A latent has more query rows than a block has elements, or as many: scaling each number is then
less work than scaling what products of each block give.

Numbers of q4_0 and q8_0 are float16, which a code's sign and a scale of 16 bits fit exactly but for one rounding, over
2^`SHIFTS`, so that none is beyond its range; those of nf4, whose scales are float32, are bfloat16. The instructions need a
GPU; their plain forms serve the interpreter and float32.
"""

from caramba.kernels.triton.dba_decode_heads import feature, number, table, tables
from caramba.kernels.triton.dba_decode_kernel import share

import triton
import triton.language as tl

SHIFTS = {"q8_0": 7, "q4_0": 3, "nf4": 0}
"""Powers of two that numbers are divided by: the largest code times the largest scale is below 65504 then."""


def _nibbles() -> str:
    """Four nibbles of each of two words to (n - 8) / 8 times the words' scales.

    2^10 + n has the nibble n as the lowest bits of float16, and 2^10 + 16 n has it as those above.
    """
    lines = [
        "{",
        ".reg .b32 w;",
        "lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xEA;",  # (a & b) | c
        "lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xEA;",
        "shr.u32 w, $4, 8;",
        "lop3.b32 $2, w, 0x000f000f, 0x64006400, 0xEA;",
        "lop3.b32 $3, w, 0x00f000f0, 0x64006400, 0xEA;",
    ]
    # Over 8, less 129 = (2^10 + 8) / 8; over 128, less 9 = (2^10 + 128) / 128.
    for i, (over, less) in enumerate(2 * (("0x30003000", "0xD808D808"), ("0x20002000", "0xC880C880"))):
        lines.append(f".reg .b32 over{i}, less{i}; mov.b32 over{i}, {over}; mov.b32 less{i}, {less};")
        lines.append(f"fma.rn.f16x2 ${i}, ${i}, over{i}, less{i};")
        lines.append(f"mul.rn.f16x2 ${i}, ${i}, $5;")
    return "\n".join([*lines, "}"])


def _bytes() -> str:
    """Two signed bytes q of each of two words to q / 128 times the words' scales.

    2^10 + 128 + q has the byte as the lowest bits of float16, its sign inverted.
    """
    lines = [
        "{",
        ".reg .b32 w, over, less;",
        "mov.b32 over, 0x20002000; mov.b32 less, 0xC880C880;",  # 1 / 128, -9
        "lop3.b32 $0, $2, 0x00ff00ff, 0x64806480, 0x6A;",  # (a & b) ^ c
        "shr.u32 w, $2, 8;",
        "lop3.b32 $1, w, 0x00ff00ff, 0x64806480, 0x6A;",
    ]
    for i in range(2):
        lines.append(f"fma.rn.f16x2 ${i}, ${i}, over, less;")
        lines.append(f"mul.rn.f16x2 ${i}, ${i}, $3;")
    return "\n".join([*lines, "}"])


def _levels() -> str:
    """Four nibbles of each of two words to their levels times the words' scales, in bfloat16.

    Low and high bytes of the levels are looked up by themselves. An instruction takes one constant: the others are
    arguments, or they would be moved to registers again for every look-up.
    """
    low, high = tables("bf16")
    lines = ["{", ".reg .b32 w, s, t, s2, t2, x, y, p, q, quarters, rest, zero;", "mov.b32 zero, 0x80008000;"]
    for plane, held, given in (("a", low, ("$6", "$8")), ("b", high, ("$10", "$12"))):
        values = given[0], f"{held[1]:#x}", given[1], f"{held[3]:#x}"
        lines += [f".reg .b32 {plane}{i}; mov.b32 {plane}{i}, {value};" for i, value in enumerate(values)]
    lines += [
        "prmt.b32 w, $4, $4, 0x3120;",  # nibbles 0 and 1 of both words, then 2 and 3 of both
        "and.b32 s, w, 0x77777777;",
        "shr.u32 t, w, 1;",
        "mov.b32 quarters, 0x44444444; mov.b32 rest, 0x32103210;",
        "lop3.b32 t, t, quarters, rest, 0xEA;",
        "shr.u32 s2, s, 16;",
        "shr.u32 t2, t, 16;",
    ]
    for s, t, outs in (("s", "t", ("$0", "$1")), ("s2", "t2", ("$2", "$3"))):
        for plane, found in (("a", "p"), ("b", "q")):
            lines.append(f"prmt.b32 x, {plane}0, {plane}1, {s};")
            lines.append(f"prmt.b32 y, {plane}2, {plane}3, {s};")
            lines.append(f"prmt.b32 {found}, x, y, {t};")
        for out, pick in zip(outs, ("0x6240", "0x7351"), strict=True):
            lines.append(f"prmt.b32 {out}, p, q, {pick};")
            lines.append(f"fma.rn.bf16x2 {out}, {out}, $5, zero;")
    return "\n".join([*lines, "}"])


SCALED = {"q4_0": _nibbles(), "q8_0": _bytes(), "nf4": _levels()}


@triton.constexpr_function
def scaled_asm(kind):
    """Return the instructions from two words and their scales to their fields' numbers."""
    return SCALED[kind]


@triton.constexpr_function
def number_dtype(kind, dtype, packed_math):
    """Return what numbers of a format are made to, for queries of a type. The interpreter has no products of bfloat16."""
    if dtype == tl.float32:
        return dtype
    return tl.bfloat16 if kind == "nf4" and packed_math else tl.float16


@triton.constexpr_function
def over(kind, dtype):
    """Return what numbers of a format are less by, for queries of a type."""
    return 1.0 if dtype == tl.float32 else 2.0 ** -SHIFTS[kind]


@triton.jit
def load_words(codes, s_plane, s_n, i, n, ok, STREAM: tl.constexpr, MASKED: tl.constexpr):
    """Load the words of tokens i + n, [tokens, words]. Strides are in words."""
    WORDS: tl.constexpr = STREAM[2]
    PER_BLOCK: tl.constexpr = STREAM[5]
    c = tl.arange(0, WORDS)
    codes += tl.full([], i, tl.int64) * s_n
    at = codes + (n * s_n)[:, None] + (c // PER_BLOCK * s_plane + c % PER_BLOCK)[None, :]
    if MASKED:
        word = tl.load(at, ok[:, None], other=0)
    else:
        word = tl.load(at)
    return word


@triton.jit
def load_scales(
    x,
    s_plane,
    s_n,
    n,
    ok,
    STREAM: tl.constexpr,
    KEYS: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the scale of each word of tokens n: [words, tokens] of keys, [tokens, words] of values."""
    WORDS: tl.constexpr = STREAM[2]
    PER_BLOCK: tl.constexpr = STREAM[5]
    BLOCKS: tl.constexpr = WORDS // PER_BLOCK
    TOKENS: tl.constexpr = n.shape[0]
    block = tl.arange(0, BLOCKS)
    if KEYS:
        at = x + (block * s_plane)[:, None] + (n * s_n)[None, :]
        allowed = ok[None, :]
    else:
        at = x + (n * s_n)[:, None] + (block * s_plane)[None, :]
        allowed = ok[:, None]
    if MASKED:
        some = tl.load(at, allowed, other=0.0)
    else:
        some = tl.load(at)
    some = some.to(DTYPE)
    if KEYS:
        wide = tl.reshape(tl.broadcast_to(some[:, None, :], (BLOCKS, PER_BLOCK, TOKENS)), (WORDS, TOKENS))
    else:
        wide = tl.reshape(tl.broadcast_to(some[:, :, None], (TOKENS, BLOCKS, PER_BLOCK)), (TOKENS, WORDS))
    return wide


@triton.jit
def scaled_fields(word, scale, nothing, STREAM: tl.constexpr, DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr):
    """Return the fields' numbers times scales, a tile each. `nothing` is 0, which the compiler must not know."""
    KIND: tl.constexpr = STREAM[0]
    LESS: tl.constexpr = over(KIND, DTYPE)
    if PACKED_MATH:
        asm: tl.constexpr = scaled_asm(KIND)
        if KIND == "q8_0":
            tiles = tl.inline_asm_elementwise(asm, "=&r,=&r,r,r", [word, scale], (tl.float16, tl.float16), True, 2)
        elif KIND == "q4_0":
            tiles = tl.inline_asm_elementwise(asm, "=&r,=&r,=&r,=&r,r,r", [word, scale], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2)  # fmt: skip
        else:
            a0: tl.constexpr = table(tl.bfloat16, 0, 0)
            a2: tl.constexpr = table(tl.bfloat16, 0, 2)
            b0: tl.constexpr = table(tl.bfloat16, 1, 0)
            b2: tl.constexpr = table(tl.bfloat16, 1, 2)
            args = [word, scale, nothing ^ a0, nothing ^ a2, nothing ^ b0, nothing ^ b2]
            held: tl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r,r"
            tiles = tl.inline_asm_elementwise(asm, held, args, (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2)  # fmt: skip
    elif KIND == "q8_0":
        low, high = word.to(tl.int8).to(tl.float32), (word >> 8).to(tl.int8).to(tl.float32)
        scale = scale.to(tl.float32) * LESS
        tiles = (low * scale).to(DTYPE), (high * scale).to(DTYPE)
    else:
        code, scale = word.to(tl.int32), scale.to(tl.float32) * LESS
        tiles = (
            (number(code & 15, KIND, tl.float32) * scale).to(DTYPE),
            (number((code >> 4) & 15, KIND, tl.float32) * scale).to(DTYPE),
            (number((code >> 8) & 15, KIND, tl.float32) * scale).to(DTYPE),
            (number((code >> 12) & 15, KIND, tl.float32) * scale).to(DTYPE),
        )
    return tiles


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LIFT = tl.constexpr(8.0)
"""Powers of two that weights are multiplied by: float16 then holds those down to 2^-32 of the largest."""
LARGEST = tl.constexpr(128.0)
"""What the largest number of a row's queries is made to, or up to twice it, before the shift of its stream."""
SMALLEST = tl.constexpr(2.0**-64)
"""What a row's largest number counts as at least, so that one over it is finite."""
ROW_TILE = tl.constexpr(16)


@triton.jit
def query_tiles(q, row, ok, STREAM: tl.constexpr):
    """Load the queries at offsets `row` as words' fields are laid out, a tile for each field.

    Split in registers, out of whole rows, they would stay there, and registers do not suffice.
    """
    WORDS: tl.constexpr = STREAM[2]
    FIELDS: tl.constexpr = STREAM[7]
    c = tl.arange(0, WORDS)
    tiles = ()
    for field in tl.static_range(FIELDS):
        d = feature(c, 0, field, STREAM)
        tiles = tiles + (tl.load(q + row[:, None] + d[None, :], ok[:, None], other=0.0),)
    return tiles


@triton.jit
def largest(tiles, FIELDS: tl.constexpr):
    """Return each row's largest number of all tiles, its sign aside, in float32."""
    top = tl.abs(tiles[0].to(tl.float32))
    for field in tl.static_range(1, FIELDS):
        top = tl.maximum(top, tl.abs(tiles[field].to(tl.float32)))
    return tl.max(top, 1)


@triton.jit
def lifted(tiles, by, FIELDS: tl.constexpr, DTYPE: tl.constexpr):
    """Return tiles times a number for each row."""
    found = ()
    for field in tl.static_range(FIELDS):
        found = found + ((tiles[field].to(tl.float32) * by[:, None]).to(DTYPE),)
    return found


@triton.jit
def store_pairs(out, at, c, low, high, kept):
    """Store tiles of two fields side by side, at twice c of the rows at `at`."""
    pair = tl.arange(0, 2)
    to = out + at[:, None, None] + c[None, :, None] + pair[None, None, :]
    both = tl.join(low, high).to(out.dtype.element_ty)
    tl.store(to, both, kept[:, None, None] & (c >= 0)[None, :, None] & (pair >= 0)[None, None, :])


@triton.jit
def add_products(s, q, tiles, FIELDS: tl.constexpr, TILES: tl.constexpr):
    """Add the products of queries with keys' fields to scores, a tile for each ROW_TILE rows."""
    found = ()
    for tile in tl.static_range(TILES):
        part = s[tile]
        for field in tl.static_range(FIELDS):
            part = tl.dot(q[tile * FIELDS + field], tiles[field], part, input_precision="ieee")
        found = found + (part,)
    return found


@triton.jit
def add_weighed(acc, p, a, tiles, FIELDS: tl.constexpr, TILES: tl.constexpr, DTYPE: tl.constexpr):
    """Add values' fields by their weights p to sums of which a is left."""
    found = ()
    for tile in tl.static_range(TILES):
        weight, left = p[tile].to(DTYPE), a[tile]
        for field in tl.static_range(FIELDS):
            old = acc[tile * FIELDS + field] * left[:, None]
            found = found + (tl.dot(weight, tiles[field], old, input_precision="ieee"),)
    return found


@triton.jit
def block_tiles(
    word, scale, z_plane, z_n, i, n, ok, nothing,
    STREAM: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Make the words of tokens i + n to scaled numbers, a tile for each field: [features, tokens] of keys, [tokens, features]
    of values."""
    i = tl.full([], i, tl.int64)
    wide = load_scales(scale + i * z_n, z_plane, z_n, n, ok, STREAM, KEYS, DTYPE, MASKED)
    if KEYS:
        word = tl.trans(word)
    return scaled_fields(word, wide, nothing, STREAM, DTYPE, PACKED_MATH)


@triton.jit
def tail_tiles(x, s_n, i, n, ok, STREAM: tl.constexpr, DTYPE: tl.constexpr):
    """Load tokens i + n of a tail as one tile [tokens, features] per field of a word."""
    KIND: tl.constexpr = STREAM[0]
    D: tl.constexpr = STREAM[1]
    WORDS: tl.constexpr = STREAM[2]
    PER_BLOCK: tl.constexpr = STREAM[5]
    FIELDS: tl.constexpr = STREAM[7]
    TOKENS: tl.constexpr = n.shape[0]
    LESS: tl.constexpr = over(KIND, DTYPE)
    d = tl.arange(0, D)
    at = x + ((i + n) * s_n)[:, None] + d[None, :]
    whole = (tl.load(at, ok[:, None] & (d >= 0)[None, :], other=0.0).to(tl.float32) * LESS).to(DTYPE)
    if FIELDS == 2:
        even, odd = tl.split(tl.reshape(whole, (TOKENS, WORDS, 2)))
        tiles = (even, odd)
    else:
        # Block, half of its bytes' bits, byte pair, byte of the pair: the second goes last, where `split` takes it.
        whole = tl.reshape(whole, (TOKENS, WORDS // PER_BLOCK, 2, PER_BLOCK, 2))
        whole = tl.reshape(tl.permute(whole, (0, 1, 3, 4, 2)), (TOKENS, WORDS, 2, 2))
        low, high = tl.split(whole)
        first, third = tl.split(low)
        second, fourth = tl.split(high)
        tiles = (first, second, third, fourth)
    return tiles


@triton.jit
def turned(tiles, FIELDS: tl.constexpr):
    """Return tiles [tokens, features] as keys are, [features, tokens]."""
    found = ()
    for field in tl.static_range(FIELDS):
        found = found + (tl.trans(tiles[field]),)
    return found


@triton.jit
def weigh(s, by, i, n, ok, end, m, window, MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, TILES: tl.constexpr, PUSH: tl.constexpr):  # fmt: skip
    """Return what scores weigh, the new maxima in base 2, and what is left of weights before."""
    scores = ()
    for tile in tl.static_range(TILES):
        part = s[tile]
        if MASKED:
            seen = ok[None, :] & ((i + n)[None, :] < end[tile][:, None])
            if HAS_WINDOW:
                seen = seen & ((i + n)[None, :] >= end[tile][:, None] - window)
            part = tl.where(seen, part, -float("inf"))
        scores = scores + (part,)
    if TILES == 2:  # warps meet once for both
        largest_of = tl.split(tl.max(tl.join(scores[0], scores[1]), 1))
    else:
        largest_of = ()
        for tile in tl.static_range(TILES):
            largest_of = largest_of + (tl.max(scores[tile], 1),)
    weights, tops, left = (), (), ()
    for tile in tl.static_range(TILES):
        top = tl.maximum(m[tile], largest_of[tile] * by[tile])
        finite = tl.where(top == -float("inf"), 0.0, top)  # -inf minus -inf where nothing has been seen
        weights = weights + (tl.exp2(scores[tile] * by[tile][:, None] - (finite - PUSH)[:, None]),)
        tops = tops + (top,)
        left = left + (tl.exp2(m[tile] - finite),)
    return weights, tops, left


@triton.jit
def add_weights(l, p, a, TILES: tl.constexpr):
    """Add weights to sums of which a is left; the sums over tokens are taken once, at the end."""
    found = ()
    for tile in tl.static_range(TILES):
        found = found + (l[tile] * a[tile][:, None] + p[tile],)
    return found


@triton.jit
def nothings(TILES: tl.constexpr, TOKENS: tl.constexpr):
    """Return scores of zero."""
    found = ()
    for _ in tl.static_range(TILES):
        found = found + (tl.zeros([ROW_TILE, TOKENS], tl.float32),)
    return found


@triton.jit
def decode_latent(
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
    packed_capacity,
    tail_capacity,
    window,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    SEM: tl.constexpr,
    GEO: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TAIL_TOKENS: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    ANNOUNCED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One split of one sequence, for BLOCK_ROWS of its GROUP * QUERIES queries.

    SEM and GEO describe a stream: (KIND, D, WORDS, E, 1, PER_BLOCK, 1, FIELDS), see `dba_decode`. The values are the
    latent, SEM; what `v` names is not read. Outputs, ANNOUNCED and EARLY are those of `split_kv_kernel`.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    WIDTH: tl.constexpr = SEM[1]
    WORDS: tl.constexpr = SEM[2]
    FIELDS: tl.constexpr = SEM[7]
    GEO_FIELDS: tl.constexpr = GEO[7]
    TILES: tl.constexpr = BLOCK_ROWS // ROW_TILE
    S_DTYPE: tl.constexpr = number_dtype(SEM[0], q_sem.dtype.element_ty, PACKED_MATH)
    G_DTYPE: tl.constexpr = number_dtype(GEO[0], q_sem.dtype.element_ty, PACKED_MATH)
    S_LESS: tl.constexpr = over(SEM[0], S_DTYPE)
    G_LESS: tl.constexpr = over(GEO[0], G_DTYPE)
    IN_16_BITS: tl.constexpr = S_DTYPE != tl.float32
    PUSH: tl.constexpr = LIFT if IN_16_BITS else 0.0
    CUT: tl.constexpr = HAS_WINDOW or QUERIES > 1
    pid = tl.program_id(0)
    first = pid % ROW_BLOCKS * BLOCK_ROWS
    b = (pid // ROW_BLOCKS).to(tl.int64)
    split, n_splits = tl.program_id(1), tl.num_programs(1)

    held = tl.maximum(tl.minimum(tl.load(packed + b * packed_b), packed_capacity), 0)
    length = tl.minimum(tl.load(seqlens + b), held + tail_capacity)
    # As a load's tile, which can be had in any layout, so that what is computed with it can.
    nothing = tl.load(seqlens + b + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]) >> 31
    held = tl.minimum(held, length)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - QUERIES + 1 - window, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    low, until, behind, high = share(start, held, length, split, n_splits, BLOCK_TOKENS, True)

    qs, qg, by, end, m, l, acc = (), (), (), (), (), (), ()
    for tile in tl.static_range(TILES):
        rows = first + tile * ROW_TILE + tl.arange(0, ROW_TILE)
        is_row = rows < GROUP * QUERIES
        h, t = rows // QUERIES, rows % QUERIES
        own_s = query_tiles(q_sem, b * qs_b + h * qs_h + t * qs_t, is_row, SEM)
        own_g = query_tiles(q_geo, b * qg_b + h * qg_h + t * qg_t, is_row, GEO)
        if IN_16_BITS:
            # By a power of two, which changes no digit: float16 reaches less far than queries may.
            top = tl.maximum(largest(own_s, FIELDS), largest(own_g, GEO_FIELDS))
            unit = (top.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            unit = tl.maximum(unit, SMALLEST)
            scale = 1.0 / unit * LARGEST
            own_s = lifted(own_s, scale / S_LESS, FIELDS, S_DTYPE)
            own_g = lifted(own_g, scale / G_LESS, GEO_FIELDS, G_DTYPE)
            by = by + (unit / LARGEST * LOG2_E,)
        else:
            by = by + (tl.full([ROW_TILE], 1.0, tl.float32) * LOG2_E,)
        qs, qg = qs + own_s, qg + own_g
        end = end + (length - QUERIES + 1 + t,)  # tokens that each row sees
        m = m + (tl.full([ROW_TILE], -float("inf"), tl.float32),)
        l = l + (tl.zeros([ROW_TILE, BLOCK_TOKENS], tl.float32),)
        for _ in tl.static_range(FIELDS):
            acc = acc + (tl.zeros([ROW_TILE, WORDS], tl.float32),)

    # Words of 16 bits, of which strides are half as many.
    sem = (sem + b * sem_b).to(tl.pointer_type(tl.int16))
    geo = (geo + b * geo_b).to(tl.pointer_type(tl.int16))
    sem_scale += b * sem_zb
    geo_scale += b * geo_zb
    n = tl.arange(0, BLOCK_TOKENS)
    middle = low + tl.maximum(until - low, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    # Whole tiles first, without masks on the loads.
    for i in tl.range(low, middle, BLOCK_TOKENS):
        ok = n >= 0
        word = load_words(sem, sem_k // 2, sem_n // 2, i, n, ok, SEM, False)  # for keys and values
        keys = block_tiles(word, sem_scale, sem_zk, sem_zn, i, n, ok, nothing, SEM, True, S_DTYPE, PACKED_MATH, False)  # fmt: skip
        s = add_products(nothings(TILES, BLOCK_TOKENS), qs, keys, FIELDS, TILES)
        far = load_words(geo, geo_k // 2, geo_n // 2, i, n, ok, GEO, False)
        keys = block_tiles(far, geo_scale, geo_zk, geo_zn, i, n, ok, nothing, GEO, True, G_DTYPE, PACKED_MATH, False)  # fmt: skip
        s = add_products(s, qg, keys, GEO_FIELDS, TILES)
        p, m, a = weigh(s, by, i, n, ok, end, m, window, CUT, HAS_WINDOW, TILES, PUSH)
        l = add_weights(l, p, a, TILES)
        values = block_tiles(word, sem_scale, sem_zk, sem_zn, i, n, ok, nothing, SEM, False, S_DTYPE, PACKED_MATH, False)  # fmt: skip
        acc = add_weighed(acc, p, a, values, FIELDS, TILES, S_DTYPE)
    for i in tl.range(middle, until, BLOCK_TOKENS, num_stages=1):
        ok = i + n < until
        word = load_words(sem, sem_k // 2, sem_n // 2, i, n, ok, SEM, True)  # for keys and values
        keys = block_tiles(word, sem_scale, sem_zk, sem_zn, i, n, ok, nothing, SEM, True, S_DTYPE, PACKED_MATH, True)  # fmt: skip
        s = add_products(nothings(TILES, BLOCK_TOKENS), qs, keys, FIELDS, TILES)
        far = load_words(geo, geo_k // 2, geo_n // 2, i, n, ok, GEO, True)
        keys = block_tiles(far, geo_scale, geo_zk, geo_zn, i, n, ok, nothing, GEO, True, G_DTYPE, PACKED_MATH, True)  # fmt: skip
        s = add_products(s, qg, keys, GEO_FIELDS, TILES)
        p, m, a = weigh(s, by, i, n, ok, end, m, window, True, HAS_WINDOW, TILES, PUSH)
        l = add_weights(l, p, a, TILES)
        values = block_tiles(word, sem_scale, sem_zk, sem_zn, i, n, ok, nothing, SEM, False, S_DTYPE, PACKED_MATH, True)  # fmt: skip
        acc = add_weighed(acc, p, a, values, FIELDS, TILES, S_DTYPE)
    sums_of_rows = ()
    for tile in tl.static_range(TILES):
        sums_of_rows = sums_of_rows + (tl.sum(l[tile], 1),)
    l = sums_of_rows
    # Tokens that are still in 16 bits; the tail has its own positions from 0.
    sem_tail += b * sem_tb
    geo_tail += b * geo_tb
    n = tl.arange(0, TAIL_TOKENS)
    for i in tl.range(behind, high, TAIL_TOKENS, num_stages=1):
        ok = i + n < high
        values = tail_tiles(sem_tail, sem_tn, i - held, n, ok, SEM, S_DTYPE)
        s = add_products(nothings(TILES, TAIL_TOKENS), qs, turned(values, FIELDS), FIELDS, TILES)
        far = tail_tiles(geo_tail, geo_tn, i - held, n, ok, GEO, G_DTYPE)
        s = add_products(s, qg, turned(far, GEO_FIELDS), GEO_FIELDS, TILES)
        p, m, a = weigh(s, by, i, n, ok, end, m, window, True, HAS_WINDOW, TILES, PUSH)
        new = ()
        for tile in tl.static_range(TILES):
            new = new + (l[tile] * a[tile] + tl.sum(p[tile], 1),)
        l = new
        acc = add_weighed(acc, p, a, values, FIELDS, TILES, S_DTYPE)

    if ANNOUNCED:
        tl.extra.cuda.gdc_launch_dependents()
    c = tl.arange(0, WORDS)
    for tile in tl.static_range(TILES):
        rows = first + tile * ROW_TILE + tl.arange(0, ROW_TILE)
        is_row = rows < GROUP * QUERIES
        some = l[tile] > 0
        total = tl.where(some, l[tile], 1.0)
        inverse = (1.0 / (total * S_LESS))[:, None]
        # Rows of the output are [B, H, QUERIES], those of the parts [B, H, QUERIES, splits].
        row = b * GROUP * QUERIES + rows
        top = m[tile] + tl.log2(total) - PUSH
        if FINAL:
            tl.store(sums + row, tl.where(some, top * LN_2, -float("inf")), is_row)
        else:
            row = row * n_splits + split
            tl.store(sums + row, tl.where(some, top, -float("inf")), is_row)
        for half in tl.static_range(FIELDS // 2):
            low = acc[tile * FIELDS + half] * inverse
            high = acc[tile * FIELDS + FIELDS // 2 + half] * inverse
            store_pairs(out, row * WIDTH, feature(c, 0, half, SEM), low, high, is_row)
