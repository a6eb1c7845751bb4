"""Blocks of a stored stream as words of 16 bits, made into numbers where a product takes them.

A word is two bytes: two codes of q8_0, or four of q4_0 and nf4. Field i of every word is a tile of its own, with a product
of its own: a register of a product's operand holds one field of two words, so that codes go from shared memory to products
without another pass through it. The fields are the codes' own numbers; the scale of a block is left to the products' results.

`keys` of 4 bits come with what their instructions leave in them, `OFFSETS`: the sum of the queries times that is taken from
the products. Values could not: over many tokens the offset would drown their mean. The instructions need a GPU; their plain
forms serve the interpreter and float32.
"""

from caramba.kernels.triton.dba_decode_tile import NF4_BITS, level

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
        lines += [
            f"prmt.b32 {out}, p, q, {pick};" for out, pick in zip(outs, ("0x6240", "0x7351"), strict=True)
        ]
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
        lines.append(
            f"mov.b32 low, 0x00ff00ff; mov.b32 less, {LESS_BYTES:#x}; mov.b32 one, {ONES[kind][0]:#x};"
        )
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
    (kind, ty, is_key): _bytes(ty)
    if kind == "q8_0"
    else _levels(ty)
    if kind == "nf4"
    else _nibbles(ty, is_key)
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
def fields(
    word, nothing, KIND: tl.constexpr, KEYS: tl.constexpr, DTYPE: tl.constexpr, PACKED_MATH: tl.constexpr
):
    """Return the fields' numbers, a tile each. `nothing` is 0, which the compiler must not know."""
    if PACKED_MATH:
        asm: tl.constexpr = assembly(KIND, DTYPE, KEYS)
        if KIND == "q8_0":
            if DTYPE == tl.bfloat16:
                tiles = tl.inline_asm_elementwise(
                    asm, "=&r,=&r,r", [word], (tl.bfloat16, tl.bfloat16), True, 2
                )
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
    wide = tl.broadcast_to(
        some.to(tl.float32)[None, :, None, :], (ROWS // PERIOD, HEADS, PERIOD // HEADS, TOKENS)
    )
    return tl.reshape(wide, (ROWS, TOKENS))
