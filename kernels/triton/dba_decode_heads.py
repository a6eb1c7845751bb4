"""Split-K decode attention on quantised streams by words of 16 bits, for several key/value heads a program.

Queries of a key/value head are few and a product has sixteen rows at least, so the rows of a program are those of several
heads, each with queries in its own head's features and zeros in the others'. What a product costs is the same, what is done
to scores (masks, exponentials, maxima) is done for as many heads at once, and blocks that heads share are read once.

A word is two bytes: two codes of q8_0, or four of q4_0 and nf4. Field i of every word is a tile of its own, with a product
of its own: a register of a product's operand holds one field of two words, so that codes go from shared memory to products
without another pass through it. The fields are the codes' own numbers; the scale of a block is left to the products' results.

`keys` of 4 bits come with what their instructions leave in them, `OFFSETS`: the sum of the queries times that is taken from
the products. Values could not: over many tokens the offset would drown their mean. The instructions need a GPU; their plain
forms serve the interpreter and float32.
"""

from caramba.kernels.triton.dba_decode_kernel import NF4_BITS, level, share

import triton
import triton.language as tl

FIELDS = {"q8_0": 2, "q4_0": 4, "nf4": 4}
"""Codes of a word."""
# 2^7 + n in bfloat16 and 2^10 + n in float16, n in the low bits: of nibbles with 8 in n, of bytes with 128 in n.
MAGIC = {"bf16": 0x43004300, "f16": 0x64006400}
OFFSETS = {"bf16": 2.0**7 + 8, "f16": 2.0**10 + 8}
ONES = {"bf16": (0x3F803F80, 0xBF80BF80), "f16": (0x3C003C00, 0xBC00BC00)}
"""Twice 1 and twice -1."""
LESS = {"bf16": 0xC308C308, "f16": 0xE408E408}
"""Minus twice `OFFSETS`."""
LESS_BYTES = 0xE480E480
"""Twice -(2^10 + 128) in float16."""


def _nibbles(kind: str, is_key: bool) -> str:
    """Four nibbles of each of two words to n - 8, or to n and an offset."""
    lines = [
        "{",
        ".reg .b32 w, mask, magic, one, less;",
        f"mov.b32 mask, 0x000f000f; mov.b32 magic, {MAGIC[kind]:#x};",
        f"mov.b32 one, {ONES[kind][0]:#x}; mov.b32 less, {LESS[kind]:#x};",
    ]
    for i in range(4):
        lines.append(f"shr.u32 w, $4, {4 * i};")
        lines.append(f"lop3.b32 ${i}, w, mask, magic, 0xEA;")  # (w & mask) | magic
        if not is_key:
            lines.append(f"fma.rn.{kind}x2 ${i}, ${i}, one, less;")
    return "\n".join([*lines, "}"])


def _levels(kind: str) -> str:
    """Four nibbles of each of two words to their levels, whose low and high bytes are looked up by themselves.

    An instruction takes one constant. The others are arguments: as constants they would be moved to registers again
    for every look-up.
    """
    low, high = tables(kind)
    lines = ["{", ".reg .b32 w, s, t, s2, t2, x, y, p, q;"]
    for plane, words, given in (("a", low, "$5 $7"), ("b", high, "$9 $11")):
        first, third = given.split()
        values = first, f"{words[1]:#x}", third, f"{words[3]:#x}"
        lines += [f".reg .b32 {plane}{i}; mov.b32 {plane}{i}, {value};" for i, value in enumerate(values)]
    lines += [
        # Nibbles 0 and 1 of both words, then 2 and 3 of both.
        "prmt.b32 w, $4, $4, 0x3120;",
        "and.b32 s, w, 0x77777777;",
        "shr.u32 t, w, 1;",
        ".reg .b32 quarters, rest; mov.b32 quarters, 0x44444444; mov.b32 rest, 0x32103210;",
        "lop3.b32 t, t, quarters, rest, 0xEA;",
        "shr.u32 s2, s, 16;",
        "shr.u32 t2, t, 16;",
    ]
    for s, t, outs in (("s", "t", ("$0", "$1")), ("s2", "t2", ("$2", "$3"))):
        for plane, found in (("a", "p"), ("b", "q")):
            lines.append(
                f"prmt.b32 x, {plane}0, {plane}1, {s}; prmt.b32 y, {plane}2, {plane}3, {s}; prmt.b32 {found}, x, y, {t};"
            )
        lines += [f"prmt.b32 {out}, p, q, {pick};" for out, pick in zip(outs, ("0x6240", "0x7351"), strict=True)]
    return "\n".join([*lines, "}"])


def tables(kind: str) -> tuple[list[int], list[int]]:
    """Return the levels' low bytes and their high bytes, four to a register."""
    return tuple(
        [sum(((NF4_BITS[kind][4 * i + j] >> shift) & 0xFF) << (8 * j) for j in range(4)) for i in range(4)]
        for shift in (0, 8)
    )


def _bytes(kind: str) -> str:
    """Two signed bytes of each of two words.

    Float16 uses 1152 + q. In bfloat16 the exponent's last bit is next to the seven of 128 + (q & 127), and is that of
    256 where q < 0: the one less the other is q.
    """
    lines = ["{", ".reg .b32 w, s, low, high, magic, less, one;", f"mov.b32 magic, {MAGIC[kind]:#x};"]
    if kind == "bf16":
        lines.append(f"mov.b32 low, 0x007f007f; mov.b32 high, 0x00800080; mov.b32 one, {ONES[kind][1]:#x};")
    else:
        lines.append(f"mov.b32 low, 0x00ff00ff; mov.b32 less, {LESS_BYTES:#x}; mov.b32 one, {ONES[kind][0]:#x};")
        lines.append("xor.b32 magic, magic, 0x00800080;")
    for i in range(2):
        lines.append(f"shr.u32 w, $2, {8 * i};")
        if kind == "bf16":
            lines.append(f"lop3.b32 ${i}, w, low, magic, 0xEA;")
            lines.append("lop3.b32 s, w, high, magic, 0xEA;")
            lines.append(f"fma.rn.bf16x2 ${i}, s, one, ${i};")
        else:
            lines.append(f"lop3.b32 ${i}, w, low, magic, 0x6A;")  # (w & low) ^ magic
            lines.append(f"fma.rn.f16x2 ${i}, ${i}, one, less;")
    return "\n".join([*lines, "}"])


ASSEMBLY = {
    (kind, ty, is_key): _bytes(ty) if kind == "q8_0" else _levels(ty) if kind == "nf4" else _nibbles(ty, is_key)
    for kind in FIELDS
    for ty in MAGIC
    for is_key in (False, True)
}


TABLES = {
    (ty, plane, i): word - (word >> 31 << 32)
    for ty in MAGIC
    for plane, held in enumerate(tables(ty))
    for i, word in enumerate(held)
}


@triton.constexpr_function
def assembly(kind, dtype, is_key):
    """Return the instructions from two words to their fields' numbers."""
    return ASSEMBLY[kind, "bf16" if dtype == tl.bfloat16 else "f16", is_key]


@triton.constexpr_function
def offset(kind, dtype):
    """Return what the fields of keys have too much."""
    return OFFSETS["bf16" if dtype == tl.bfloat16 else "f16"] if kind == "q4_0" else 0.0


@triton.constexpr_function
def table(dtype, plane, i):
    """Return a register of the levels' bytes, as a signed number."""
    return TABLES["bf16" if dtype == tl.bfloat16 else "f16", plane, i]


@triton.jit
def load_words(
    codes,
    s_plane,
    s_n,
    n,
    ok,
    c,
    PHASE: tl.constexpr,
    STREAM: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load words c of a phase of tokens n: [words, tokens] of keys, [tokens, words] of values."""
    PER_BLOCK: tl.constexpr = STREAM[5]
    PHASES: tl.constexpr = STREAM[4]
    across = (c // PER_BLOCK * PHASES + PHASE) * s_plane + c % PER_BLOCK
    if KEYS:
        at = codes + across[:, None] + (n * s_n)[None, :]
        allowed = ok[None, :]
    else:
        at = codes + (n * s_n)[:, None] + across[None, :]
        allowed = ok[:, None]
    if MASKED:
        word = tl.load(at, allowed, other=0)
    else:
        word = tl.load(at)
    return word


@triton.jit
def fields(word, nothing, KIND: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr):
    """Return the fields' numbers, a tile each. `nothing` is 0, which the compiler must not know."""
    if PACKED_MATH:
        asm: tl.constexpr = assembly(KIND, DTYPE, KEYS)
        if KIND == "q8_0":
            if DTYPE == tl.bfloat16:
                tiles = tl.inline_asm_elementwise(asm, "=&r,=&r,r", [word], (tl.bfloat16, tl.bfloat16), True, 2)
            else:
                tiles = tl.inline_asm_elementwise(asm, "=&r,=&r,r", [word], (tl.float16, tl.float16), True, 2)
        elif KIND == "q4_0":
            if DTYPE == tl.bfloat16:
                tiles = tl.inline_asm_elementwise(asm, "=&r,=&r,=&r,=&r,r", [word], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2)  # fmt: skip
            else:
                tiles = tl.inline_asm_elementwise(asm, "=&r,=&r,=&r,=&r,r", [word], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2)  # fmt: skip
        else:
            a0: tl.constexpr = table(DTYPE, 0, 0)
            a2: tl.constexpr = table(DTYPE, 0, 2)
            b0: tl.constexpr = table(DTYPE, 1, 0)
            b2: tl.constexpr = table(DTYPE, 1, 2)
            args = [word, nothing ^ a0, nothing ^ a2, nothing ^ b0, nothing ^ b2]
            held: tl.constexpr = "=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r,r"
            if DTYPE == tl.bfloat16:
                tiles = tl.inline_asm_elementwise(asm, held, args, (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2)  # fmt: skip
            else:
                tiles = tl.inline_asm_elementwise(asm, held, args, (tl.float16, tl.float16, tl.float16, tl.float16), True, 2)  # fmt: skip
    elif KIND == "q8_0":
        tiles = (word.to(tl.int8).to(DTYPE), (word >> 8).to(tl.int8).to(DTYPE))
    else:
        code = word.to(tl.int32)
        tiles = (
            number(code & 15, KIND, DTYPE),
            number((code >> 4) & 15, KIND, DTYPE),
            number((code >> 8) & 15, KIND, DTYPE),
            number((code >> 12) & 15, KIND, DTYPE),
        )
    return tiles


@triton.jit
def number(code, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """Return what 4-bit codes mean, without a scale."""
    if KIND == "nf4":
        meant = level(code)
    else:
        meant = code.to(tl.float32) - 8.0
    return meant.to(DTYPE)


@triton.jit
def feature(c, PHASE: tl.constexpr, FIELD: tl.constexpr, STREAM: tl.constexpr):
    """Return the feature, over all the program's heads, of a field of words c of a phase."""
    E: tl.constexpr = STREAM[3]
    PHASES: tl.constexpr = STREAM[4]
    PER_BLOCK: tl.constexpr = STREAM[5]
    KIND: tl.constexpr = STREAM[0]
    if KIND == "q8_0":
        inside = 2 * (c % PER_BLOCK) + FIELD
    else:
        inside = 2 * (c % PER_BLOCK) + FIELD // 2 + FIELD % 2 * (E // 2)
    return (c // PER_BLOCK * PHASES + PHASE) * E + inside


@triton.jit
def row_scales(
    x,
    s_plane,
    s_n,
    n,
    ok,
    PHASE: tl.constexpr,
    STREAM: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the scale of each row's block of a phase at tokens n, [ROWS, tokens].

    Rows of a head are adjacent in every eight. Heads of one block load its scale each: in 16 bits a copy to shared
    memory needs two numbers a thread.
    """
    D: tl.constexpr = STREAM[1]
    E: tl.constexpr = STREAM[3]
    HEADS: tl.constexpr = STREAM[6]
    TOKENS: tl.constexpr = n.shape[0]
    plane = tl.arange(0, HEADS) * D // E + PHASE
    at = x + plane[:, None] * s_plane + (n * s_n)[None, :]
    if MASKED:
        some = tl.load(at, ok[None, :], other=0.0)
    else:
        some = tl.load(at)
    PERIOD: tl.constexpr = 8 if HEADS <= 8 else HEADS
    wide = tl.broadcast_to(some.to(tl.float32)[None, :, None, :], (ROWS // PERIOD, HEADS, PERIOD // HEADS, TOKENS))
    return tl.reshape(wide, (ROWS, TOKENS))


LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def own_queries(q, row, local, ok, STREAM: tl.constexpr):
    """Load the queries at offsets `row` as words' fields are laid out, a tile for each phase and field."""
    WORDS: tl.constexpr = STREAM[2]
    PHASES: tl.constexpr = STREAM[4]
    FIELDS: tl.constexpr = STREAM[7]
    D: tl.constexpr = STREAM[1]
    c = tl.arange(0, WORDS)
    tiles = ()
    for phase in tl.static_range(PHASES):
        for field in tl.static_range(FIELDS):
            d = feature(c, phase, field, STREAM)
            kept = ok[:, None] & ((d // D)[None, :] == local[:, None])
            tiles = tiles + (tl.load(q + row[:, None] + (d % D)[None, :], kept, other=0.0),)
    return tiles


@triton.jit
def query_sums(q, STREAM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr):
    """Return what keys' offsets give the products of each phase, by rows."""
    PHASES: tl.constexpr = STREAM[4]
    KIND: tl.constexpr = STREAM[0]
    FIELDS: tl.constexpr = STREAM[7]
    sums = ()
    for phase in tl.static_range(PHASES):
        if PACKED_MATH and KIND == "q4_0":
            some = q[phase * FIELDS].to(tl.float32)
            for field in tl.static_range(1, FIELDS):
                some += q[phase * FIELDS + field].to(tl.float32)
            total = tl.sum(some, 1)
        else:
            total = tl.zeros([ROWS], tl.float32)
        sums = sums + (total * offset(KIND, DTYPE),)
    return sums


@triton.jit
def scores(
    q, sums, x, s_plane, s_n, scale, z_plane, z_n, i, n, ok, nothing,
    STREAM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the products of queries with tokens i + n of a stream's blocks, [ROWS, tokens]."""
    WORDS: tl.constexpr = STREAM[2]
    PHASES: tl.constexpr = STREAM[4]
    KIND: tl.constexpr = STREAM[0]
    FIELDS: tl.constexpr = STREAM[7]
    i = tl.full([], i, tl.int64)
    c = tl.arange(0, WORDS)
    total = tl.zeros([ROWS, n.shape[0]], tl.float32)
    for phase in tl.static_range(PHASES):
        word = load_words(x + i * s_n, s_plane, s_n, n, ok, c, phase, STREAM, True, MASKED)
        tiles = fields(word, nothing, KIND, True, DTYPE, PACKED_MATH)
        part = tl.zeros([ROWS, n.shape[0]], tl.float32) - sums[phase][:, None]
        for field in tl.static_range(FIELDS):
            part = tl.dot(q[phase * FIELDS + field], tiles[field], part, input_precision="ieee")
        z = row_scales(scale + i * z_n, z_plane, z_n, n, ok, phase, STREAM, ROWS, MASKED)
        total += part * z
    return total


@triton.jit
def weigh(s, seen, m, l, MASKED: tl.constexpr):
    """Return what scores weigh, the new maximum in base 2 and sums, and what is left of weights before."""
    if MASKED:
        s = tl.where(seen, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1) * LOG2_E)
    finite = tl.where(top == -float("inf"), 0.0, top)  # -inf minus -inf where nothing has been seen
    p = tl.exp2(s * LOG2_E - finite[:, None])
    a = tl.exp2(m - finite)
    return p, top, l * a[:, None] + p, a


@triton.jit
def read_blocks(
    acc, p, a, x, s_plane, s_n, scale, z_plane, z_n, i, n, ok, nothing,
    STREAM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add tokens i + n of the values' blocks, by their weights p, to sums of which a is left."""
    WORDS: tl.constexpr = STREAM[2]
    PHASES: tl.constexpr = STREAM[4]
    KIND: tl.constexpr = STREAM[0]
    FIELDS: tl.constexpr = STREAM[7]
    i = tl.full([], i, tl.int64)
    c = tl.arange(0, WORDS)
    new = ()
    for phase in tl.static_range(PHASES):
        z = row_scales(scale + i * z_n, z_plane, z_n, n, ok, phase, STREAM, ROWS, MASKED)
        scaled = (p * z).to(DTYPE)
        word = load_words(x + i * s_n, s_plane, s_n, n, ok, c, phase, STREAM, False, MASKED)
        tiles = fields(word, nothing, KIND, False, DTYPE, PACKED_MATH)
        for field in tl.static_range(FIELDS):
            old = acc[phase * FIELDS + field] * a[:, None]
            new = new + (tl.dot(scaled, tiles[field], old, input_precision="ieee"),)
    return new


@triton.jit
def tail_scores(
    q, x, s_k, s_n, i, n, ok, STREAM: tl.constexpr, ROWS: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Return the products of queries with tokens i + n of a tail, which are numbers."""
    WORDS: tl.constexpr = STREAM[2]
    PHASES: tl.constexpr = STREAM[4]
    D: tl.constexpr = STREAM[1]
    FIELDS: tl.constexpr = STREAM[7]
    c = tl.arange(0, WORDS)
    total = tl.zeros([ROWS, n.shape[0]], tl.float32)
    for phase in tl.static_range(PHASES):
        for field in tl.static_range(FIELDS):
            d = feature(c, phase, field, STREAM)
            at = x + (d // D * s_k + d % D)[:, None] + ((i + n) * s_n)[None, :]
            tile = tl.load(at, ok[None, :] & (d >= 0)[:, None], other=0.0).to(DTYPE)
            total = tl.dot(q[phase * FIELDS + field], tile, total, input_precision="ieee")
    return total


@triton.jit
def read_tail(acc, p, a, x, s_k, s_n, i, n, ok, STREAM: tl.constexpr, DTYPE: tl.constexpr):
    """Add tokens i + n of the values' tail, by their weights p, to sums of which a is left."""
    WORDS: tl.constexpr = STREAM[2]
    PHASES: tl.constexpr = STREAM[4]
    D: tl.constexpr = STREAM[1]
    FIELDS: tl.constexpr = STREAM[7]
    c = tl.arange(0, WORDS)
    p = p.to(DTYPE)
    new = ()
    for phase in tl.static_range(PHASES):
        for field in tl.static_range(FIELDS):
            d = feature(c, phase, field, STREAM)
            at = x + ((i + n) * s_n)[:, None] + (d // D * s_k + d % D)[None, :]
            tile = tl.load(at, ok[:, None] & (d >= 0)[None, :], other=0.0).to(DTYPE)
            old = acc[phase * FIELDS + field] * a[:, None]
            new = new + (tl.dot(p, tile, old, input_precision="ieee"),)
    return new


@triton.jit
def decode_heads(
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
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    SEM: tl.constexpr,
    GEO: tl.constexpr,
    V: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    FINAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    TAIL_TOKENS: tl.constexpr,
    PACKED_MATH: tl.constexpr,
    ANNOUNCED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One split of HEADS key/value heads of one sequence, for the GROUP * QUERIES queries of each.

    SEM, GEO and V describe a stream: (KIND, D, WORDS, E, PHASES, PER_BLOCK, HEADS, FIELDS). WORDS are those of a phase,
    PER_BLOCK those of a block; phase f of PHASES is block f of every head, or there is one, of all blocks that hold the
    heads. Outputs, ANNOUNCED and EARLY are those of `split_kv_kernel`.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
    V_D: tl.constexpr = V[1]
    V_WORDS: tl.constexpr = V[2]
    V_PHASES: tl.constexpr = V[4]
    V_FIELDS: tl.constexpr = V[7]
    DTYPE: tl.constexpr = q_sem.dtype.element_ty
    # Weights times scales may overflow float16, as their sums over many tokens may.
    V_DTYPE: tl.constexpr = tl.bfloat16 if PACKED_MATH else tl.float32
    ROWS: tl.constexpr = GROUP * QUERIES
    # Rows g and g + 8 of a product are in one thread: of one head they take the same scales.
    PERIOD: tl.constexpr = 8 if HEADS <= 8 else HEADS
    SHARE: tl.constexpr = PERIOD // HEADS
    pid = tl.program_id(0)
    head = pid % (KV_HEADS // HEADS) * HEADS
    b = (pid // (KV_HEADS // HEADS)).to(tl.int64)
    split, n_splits = tl.program_id(1), tl.num_programs(1)
    rows = tl.arange(0, BLOCK_ROWS)
    local, rank = rows % PERIOD // SHARE, rows // PERIOD * SHARE + rows % SHARE
    is_row = rank < ROWS
    h, t = (head + local) * GROUP + rank // QUERIES, rank % QUERIES

    held = tl.maximum(tl.minimum(tl.load(packed + b * packed_b), packed_capacity), 0)
    length = tl.minimum(tl.load(seqlens + b), held + tail_capacity)
    # As a load's tile, which can be had in any layout, so that what is computed with it can.
    nothing = tl.load(seqlens + b + tl.arange(0, 1)[:, None] + tl.arange(0, 1)[None, :]) >> 31
    held = tl.minimum(held, length)
    end = length - QUERIES + 1 + t  # tokens that each row sees
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(length - QUERIES + 1 - window, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    low, until, first, high = share(start, held, length, split, n_splits, BLOCK_TOKENS, True)

    qs = own_queries(q_sem, b * qs_b + h * qs_h + t * qs_t, local, is_row, SEM)
    qg = own_queries(q_geo, b * qg_b + h * qg_h + t * qg_t, local, is_row, GEO)
    qs_sums = query_sums(qs, SEM, BLOCK_ROWS, DTYPE, PACKED_MATH)
    qg_sums = query_sums(qg, GEO, BLOCK_ROWS, DTYPE, PACKED_MATH)

    # Words of 16 bits, of which strides are half as many.
    far = head.to(tl.int64)
    sem = (sem + b * sem_b + far * SEM[1] // SEM[3] * sem_k).to(tl.pointer_type(tl.int16))
    geo = (geo + b * geo_b + far * GEO[1] // GEO[3] * geo_k).to(tl.pointer_type(tl.int16))
    v = (v + b * v_b + far * V_D // V[3] * v_k).to(tl.pointer_type(tl.int16))
    sem_scale += b * sem_zb + far * SEM[1] // SEM[3] * sem_zk
    geo_scale += b * geo_zb + far * GEO[1] // GEO[3] * geo_zk
    v_scale += b * v_zb + far * V_D // V[3] * v_zk

    m = tl.full([BLOCK_ROWS], -float("inf"), tl.float32)
    l = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    acc = ()
    for _ in tl.static_range(V_PHASES * V_FIELDS):
        acc = acc + (tl.zeros([BLOCK_ROWS, V_WORDS], tl.float32),)
    n = tl.arange(0, BLOCK_TOKENS)

    CUT: tl.constexpr = HAS_WINDOW or QUERIES > 1
    middle = low + tl.maximum(until - low, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    for i in tl.range(low, middle, BLOCK_TOKENS):
        ok = n >= 0
        s = scores(qs, qs_sums, sem, sem_k // 2, sem_n // 2, sem_scale, sem_zk, sem_zn, i, n, ok, nothing, SEM, BLOCK_ROWS, DTYPE, PACKED_MATH, False)  # fmt: skip
        s += scores(qg, qg_sums, geo, geo_k // 2, geo_n // 2, geo_scale, geo_zk, geo_zn, i, n, ok, nothing, GEO, BLOCK_ROWS, DTYPE, PACKED_MATH, False)  # fmt: skip
        seen = (i + n)[None, :] < end[:, None]
        if HAS_WINDOW:
            seen = seen & ((i + n)[None, :] >= end[:, None] - window)
        p, m, l, a = weigh(s, seen, m, l, CUT)
        acc = read_blocks(acc, p, a, v, v_k // 2, v_n // 2, v_scale, v_zk, v_zn, i, n, ok, nothing, V, BLOCK_ROWS, V_DTYPE, PACKED_MATH, False)  # fmt: skip
    for i in tl.range(middle, until, BLOCK_TOKENS, num_stages=1):
        ok = i + n < until
        s = scores(qs, qs_sums, sem, sem_k // 2, sem_n // 2, sem_scale, sem_zk, sem_zn, i, n, ok, nothing, SEM, BLOCK_ROWS, DTYPE, PACKED_MATH, True)  # fmt: skip
        s += scores(qg, qg_sums, geo, geo_k // 2, geo_n // 2, geo_scale, geo_zk, geo_zn, i, n, ok, nothing, GEO, BLOCK_ROWS, DTYPE, PACKED_MATH, True)  # fmt: skip
        seen = ok[None, :] & ((i + n)[None, :] < end[:, None])
        if HAS_WINDOW:
            seen = seen & ((i + n)[None, :] >= end[:, None] - window)
        p, m, l, a = weigh(s, seen, m, l, True)
        acc = read_blocks(acc, p, a, v, v_k // 2, v_n // 2, v_scale, v_zk, v_zn, i, n, ok, nothing, V, BLOCK_ROWS, V_DTYPE, PACKED_MATH, True)  # fmt: skip
    l = tl.sum(l, 1)
    # Tokens that are still in 16 bits; the tail has its own positions from 0.
    sem_tail += b * sem_tb + far * sem_tk
    geo_tail += b * geo_tb + far * geo_tk
    v_tail += b * v_tb + far * v_tk
    n = tl.arange(0, TAIL_TOKENS)
    for i in tl.range(first, high, TAIL_TOKENS, num_stages=1):
        ok = i + n < high
        s = tail_scores(qs, sem_tail, sem_tk, sem_tn, i - held, n, ok, SEM, BLOCK_ROWS, DTYPE)
        s += tail_scores(qg, geo_tail, geo_tk, geo_tn, i - held, n, ok, GEO, BLOCK_ROWS, DTYPE)
        seen = ok[None, :] & ((i + n)[None, :] < end[:, None])
        if HAS_WINDOW:
            seen = seen & ((i + n)[None, :] >= end[:, None] - window)
        p, m, weight, a = weigh(s, seen, m, tl.zeros_like(s), True)
        l = l * a + tl.sum(weight, 1)
        acc = read_tail(acc, p, a, v_tail, v_tk, v_tn, i - held, n, ok, V, V_DTYPE)

    if ANNOUNCED:
        tl.extra.cuda.gdc_launch_dependents()
    some = l > 0
    total = tl.where(some, l, 1.0)
    # Rows of the output are [B, H, QUERIES], those of the parts [B, H, QUERIES, splits].
    row = (b * KV_HEADS * GROUP + h) * QUERIES + t
    if FINAL:
        tl.store(sums + row, tl.where(some, (m + tl.log2(total)) * LN_2, -float("inf")), is_row)
    else:
        row = row * n_splits + split
        tl.store(sums + row, tl.where(some, m + tl.log2(total), -float("inf")), is_row)
    row = row * V_D
    c = tl.arange(0, V_WORDS)
    for phase in tl.static_range(V_PHASES):
        for field in tl.static_range(V_FIELDS):
            d = feature(c, phase, field, V)
            kept = is_row[:, None] & ((d // V_D)[None, :] == local[:, None])
            part = acc[phase * V_FIELDS + field] / total[:, None]
            tl.store(out + row[:, None] + (d % V_D)[None, :], part.to(out.dtype.element_ty), kept)
