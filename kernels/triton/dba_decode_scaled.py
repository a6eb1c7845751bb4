"""Words of 16 bits of a latent's blocks, made into scaled numbers where a product takes them.

As in `dba_decode_words` field i of every word is a tile of its own, and codes go from shared memory to products without
another pass through it. A latent has more query rows than a block has elements, or as many: scaling each number is then
less work than scaling what products of each block give.

Numbers of q4_0 and q8_0 are float16, which a code's sign and a scale of 16 bits fit exactly but for one rounding, over
2^`SHIFTS`, so that none is beyond its range; those of nf4, whose scales are float32, are bfloat16. The instructions need a
GPU; their plain forms serve the interpreter and float32.
"""

from caramba.kernels.triton.dba_decode_words import number, table, tables

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
            tiles = tl.inline_asm_elementwise(
                asm, "=&r,=&r,r,r", [word, scale], (tl.float16, tl.float16), True, 2
            )
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
