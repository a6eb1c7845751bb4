"""The packed instructions of decode attention, executed one by one here: every code of every format, bit for bit."""

from __future__ import annotations

import re
import struct

import pytest
import torch

from caramba.ops import formats

pytest.importorskip("triton")
from caramba.kernels.triton import dba_decode_heads as words
from caramba.kernels.triton import dba_decode_kernel as tile
from caramba.kernels.triton import dba_decode_latent as scaled

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def pair(word: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([word & 0xFFFF, word >> 16], dtype=torch.int32).to(torch.uint16).view(dtype)


def word_of(values: torch.Tensor) -> int:
    low, high = (int(x) & 0xFFFF for x in values.view(torch.int16))
    return low | high << 16


def as_float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]


def permute(a: int, b: int, selector: int) -> int:
    source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
    assert not selector & 0x8888  # the mode that repeats a sign is not used
    return int.from_bytes(bytes(source[selector >> 4 * i & 7] for i in range(4)), "little")


def look_up(words: list[int], table: int) -> int:
    """Of three words' bits, as the table of all eight combinations says."""
    found = 0
    for entry in range(8):
        if table >> entry & 1:
            found |= (
                (words[0] if entry & 4 else ~words[0])
                & (words[1] if entry & 2 else ~words[1])
                & (words[2] if entry & 1 else ~words[2])
            )
    return found & 0xFFFFFFFF


def execute(assembly: str, inputs: list[int | float], n_outputs: int) -> list[int]:
    """Run PTX of the few instructions that the tiles use."""
    registers: dict[str, int | float] = {f"${n_outputs + i}": value for i, value in enumerate(inputs)}

    def value(name: str) -> int | float:
        if name.startswith("0f"):
            return as_float(int(name[2:], 16))
        return registers[name] if name in registers else int(name, 0)

    for statement in re.split(r"[;\n]+", assembly.strip("{}\n ")):
        if not statement.strip() or statement.strip().startswith(".reg"):
            continue
        op, _, rest = statement.strip().partition(" ")
        out, *names = (name.strip() for name in rest.split(","))
        x = [value(name) for name in names]
        if op == "fma.rn.f32":
            # Of one rounding: products and sums of these numbers are exact in float64.
            registers[out] = float(torch.tensor(x[0] * x[1] + x[2], dtype=torch.float64).float())
        elif op.startswith("fma.rn."):
            dtype = TYPES[op.split(".")[2][:-2]]
            a, b, c = (pair(int(word), dtype).double() for word in x)
            registers[out] = word_of((a * b + c).to(dtype))
        elif op.startswith("mul.rn."):
            dtype = TYPES[op.split(".")[2][:-2]]
            a, b = (pair(int(word), dtype).double() for word in x)
            registers[out] = word_of((a * b).to(dtype))
        elif op.startswith("cvt.rn."):
            dtype = TYPES[op.split(".")[2][:-2]]
            registers[out] = word_of(torch.tensor([x[1], x[0]], dtype=torch.float32).to(dtype))
        elif op == "lop3.b32":
            *bits, table = (int(item) for item in x)
            registers[out] = look_up(bits, table)
        elif op == "mov.b32":
            registers[out] = as_float(int(x[0])) if out.startswith("f") else x[0]
        else:
            a, b, *more = (int(item) for item in x)
            registers[out] = {
                "and.b32": lambda a, b: a & b,
                "or.b32": lambda a, b: a | b,
                "xor.b32": lambda a, b: a ^ b,
                "shr.u32": lambda a, b: a >> b,
                "prmt.b32": permute,
            }[op](a, b, *(word & 0x7777 if not word & 0x8888 else word for word in more))
    return [int(registers[f"${i}"]) for i in range(n_outputs)]


def meant(kind: str, code: int) -> float:
    return formats.NF4_LEVELS[code] if kind == "nf4" else code - 8.0


@pytest.mark.parametrize("ty", TYPES)
@pytest.mark.parametrize("kind", ["q4_0", "nf4"])
def test_four_bit_codes_become_their_numbers(kind: str, ty: str) -> None:
    dtype = TYPES[ty]
    scales = torch.tensor([0.37, -1.9, 3.25, 0.011]).to(dtype)
    words = [word_of(scales[:2]), word_of(scales[2:])]
    for code in range(256):
        codes = [code, 255 - code, code ^ 0x5A, code * 7 % 256]
        packed = int.from_bytes(bytes(codes), "little")
        halves = execute(tile.HALVES[kind, ty], [packed, *words], 4)
        for half, outs in enumerate((halves[:2], halves[2:])):
            levels = torch.tensor([meant(kind, byte >> 4 * half & 15) for byte in codes]).to(dtype)
            got = torch.cat([pair(out, dtype) for out in outs])
            assert torch.equal(got, (levels.double() * scales.double()).to(dtype)), (code, half)
            shifted = execute(tile.WHOLE[kind, ty], [packed, *[4 * half] * 4, *words], 2)
            assert torch.equal(torch.cat([pair(out, dtype) for out in shifted]), got)


@pytest.mark.parametrize("ty", TYPES)
def test_bytes_become_their_numbers(ty: str) -> None:
    scales = torch.tensor([0.37, 65504.0, 6e-8, 1.75]).half().float()  # as they are stored, the ends of the range too
    shifts = scales * tile.Q8_SHIFT.value
    assert torch.equal(shifts.double(), scales.double() * tile.Q8_SHIFT.value), "exact in float32"
    for code in range(-127, 128):
        codes = torch.tensor([code, -code, code // 2, 127], dtype=torch.int8)
        packed = int.from_bytes(codes.numpy().tobytes(), "little")
        outs = execute(tile.WHOLE["q8_0", ty], [packed, *scales.tolist(), *shifts.tolist()], 2)
        wanted = (codes.float() * scales).to(TYPES[ty])
        assert torch.equal(torch.cat([pair(out, TYPES[ty]) for out in outs]), wanted)


@pytest.mark.parametrize("ty", TYPES)
@pytest.mark.parametrize(("kind", "is_key"), [("q8_0", False), ("q4_0", False), ("q4_0", True), ("nf4", True)])
def test_words_become_their_fields_numbers(kind: str, ty: str, is_key: bool) -> None:
    dtype, n_fields = TYPES[ty], words.FIELDS[kind]
    bits, too_much = 16 // n_fields, words.OFFSETS[ty] if kind == "q4_0" and is_key else 0.0
    low, high = words.tables(ty)
    held = [low[0], low[2], high[0], high[2]] if kind == "nf4" else []
    for byte in range(256):
        # All bytes in all four places.
        packed = int.from_bytes(bytes([byte, 255 - byte, byte ^ 0x5A, byte * 7 % 256]), "little")
        given = [packed, *(word for word in held for _ in range(2))]
        fields = execute(words.ASSEMBLY[kind, ty, is_key], given, n_fields)
        for i, field in enumerate(fields):
            codes = [packed >> 16 * token + bits * i & (1 << bits) - 1 for token in range(2)]
            signed = [code - 256 * (code > 127) if kind == "q8_0" else meant(kind, code) for code in codes]
            wanted = (torch.tensor(signed, dtype=torch.float64).to(dtype).double() + too_much).to(dtype)
            assert torch.equal(pair(field, dtype), wanted), (packed, i)


@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "nf4"])
def test_words_become_their_fields_numbers_times_scales(kind: str) -> None:
    ty = "bf16" if kind == "nf4" else "f16"
    dtype, n_fields = TYPES[ty], words.FIELDS[kind]
    bits = 16 // n_fields
    low, high = words.tables("bf16")
    held = [low[0], low[2], high[0], high[2]] if kind == "nf4" else []
    # As they are stored, the ends of the range too: nothing is beyond float16.
    for scales in torch.tensor([[0.37, -1.9], [65504.0, 6e-8], [0.011, 3.25]]).to(dtype):
        for byte in range(256):
            packed = int.from_bytes(bytes([byte, 255 - byte, byte ^ 0x5A, byte * 7 % 256]), "little")
            given = [packed, word_of(scales), *(word for word in held for _ in range(2))]
            fields = execute(scaled.SCALED[kind], given, n_fields)
            for i, field in enumerate(fields):
                codes = [packed >> 16 * token + bits * i & (1 << bits) - 1 for token in range(2)]
                signed = [code - 256 * (code > 127) if kind == "q8_0" else meant(kind, code) for code in codes]
                levels = torch.tensor(signed, dtype=torch.float64)
                if kind == "nf4":
                    levels = levels.to(dtype).double()
                wanted = (levels * scales.double() / 2 ** scaled.SHIFTS[kind]).to(dtype)
                assert wanted.isfinite().all()
                assert torch.equal(pair(field, dtype).float() + 0.0, wanted.float() + 0.0), (packed, i)


def test_the_levels_are_those_of_the_format() -> None:
    assert tile.NF4_LEVELS == formats.NF4_LEVELS
    for ty, dtype in TYPES.items():
        bits = torch.tensor(tile.NF4_BITS[ty], dtype=torch.int32).to(torch.uint16).view(dtype)
        assert torch.equal(bits, torch.tensor(formats.NF4_LEVELS).to(dtype))
