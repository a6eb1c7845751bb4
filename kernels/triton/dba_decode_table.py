"""How decode attention is cut into programs: measured choices by shape, and a rule where nothing was measured."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import caramba.kernels.cuda.blocks as blocks
import caramba.kernels.cuda.launch_configs as cuda
from caramba.kernels.cuda.blocks import ZEROS
from caramba.kernels.triton.pdl import EARLY_ARCHS

READINGS = {
    # Tokens of a tile, warps, stages and registers. Without a limit a thread takes up to 255 registers in any of these,
    # for the sake of the masked tiles at the end, so that a multiprocessor holds eight warps at most.
    True: (
        *((128, 8, n_stages, 128) for n_stages in (2, 3)),
        *((128, 4, n_stages, 0) for n_stages in (2, 3)),
        *((64, 4, n_stages, 128) for n_stages in (2, 3)),
        *((64, 4, n_stages, 168) for n_stages in (2, 3)),
        *((64, 4, n_stages, 0) for n_stages in (2, 3)),
        *((64, 2, n_stages, 0) for n_stages in (2, 3)),
        *((32, 4, n_stages, 168) for n_stages in (2, 3)),
        (128, 4, 3, 128),
        (256, 8, 2, 0),
    ),
    False: (
        *((n, n_warps, n_stages, 0) for n in (32, 64, 128) for n_warps in (4, 8) for n_stages in (2, 3, 4)),
        *((64, 4, n_stages, 128) for n_stages in (2, 3)),
    ),
}
"""Tile configs worth timing, by whether any stream is quantised."""
OF_NARROW_HEADS = (256, 4, 2, 0), (256, 8, 3, 0), (64, 1, 4, 0), (128, 2, 2, 0)
NARROW = 128
"""The same of numbers of so few features, of which few tokens are few bytes in a row: fewer programs that read longer
runs of memory each; or as many programs as there are sequences' heads, of a warp or two that wait for no other."""
GROUPED = (
    *((128, 4, n_stages, 0) for n_stages in (2, 3)),
    *((128, 8, n_stages, 0) for n_stages in (2, 3)),
    *((64, 4, n_stages, 0) for n_stages in (2, 3, 4)),
    *((64, 4, n_stages, 168) for n_stages in (2, 3)),
    *((64, 8, n_stages, 0) for n_stages in (2, 3)),
    (128, 8, 2, 128),
)
"""The same for GROUP_ROWS rows, of which half may be empty: Hopper's warp-group products take no fewer."""
TOGETHER = (
    *((128, 4, n_stages, n_registers) for n_stages in (3, 2) for n_registers in (168, 0)),
    *((64, 4, n_stages, n_registers) for n_stages in (3, 4) for n_registers in (128, 168, 0)),
    *((64, 2, n_stages, 0) for n_stages in (2, 3)),
    *((32, n_warps, n_stages, 168) for n_warps in (2, 1) for n_stages in (3, 4)),
    (128, 4, 2, 128),
)
"""The same for heads of quantised streams that are read together."""
BY_WORDS = (
    *((64, 4, n_stages, n_registers) for n_stages in (3, 4) for n_registers in (168, 0)),
    *((64, 2, n_stages, 0) for n_stages in (3, 4)),
    *((128, 4, n_stages, n_registers) for n_stages in (3, 2) for n_registers in (168, 0)),
    *((32, 2, n_stages, n_registers) for n_stages in (3, 4) for n_registers in (168, 0)),
    (32, 1, 3, 0),
)
"""The same for a quantised latent whose codes go to products by words."""
MOST_ROWS_OF_WORDS = 32
"""Rows of a program that reads a latent by words: the sums of more take too many registers."""
MOST_TOGETHER = 4
"""Heads that are read together at most: the sums of more take too many registers."""
WIDEST_GROUPED = 384
"""Features of both parts up to which three stages of 64 tokens and the queries were measured, 196 KB in all."""
SHARED_BYTES = blocks.MOST_SHARED
SM_BYTES = 228 * 1024
"""Shared memory of a multiprocessor of Hopper, of which each block takes 1 KB more than it asks for."""
LEEWAY = 1024  # bytes that a kernel may take beyond what is counted
NUMBER_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, blocks.ZEROS: 2}
BLOCKS = {kind: (elements, codes / elements, scale) for kind, (elements, codes, scale) in blocks.BLOCKS.items()}
"""Elements of a block, bytes of a code and of a scale."""
TOGETHER_ROWS = 16
"""Rows of a product, which heads that are read together fill."""
GROUP_ROWS = 64
"""Rows of a product of a warp group."""
TABLE = Path(__file__).with_name("dba_decode_table.json")
PROGRAMS_PER_SM = 2, 4
"""Programs on a processor, of blocks and of numbers, as far as shared memory has place for their tiles: registers bound
the first, and what was measured of narrow heads is best with as many as the second."""
COUNTED_PER_SM = 1, 2, 3, 4, 6, 8, 12, 16
"""Programs per multiprocessor worth timing. More than fit at once start as others end. That balances multiprocessors
with unequal bandwidth, but each program refills the pipeline of loads."""
FEW_READERS = 8
"""Blocks that read a sequence's key/value head up to which one fewer is not worth timing: the others would read an
eighth more."""
MOST_SPLITS = 512  # that the op takes
REACH = 1.0  # how far, in powers of two of sequences and tokens together, a measured choice may be borrowed


@dataclass(frozen=True)
class DecodeShape:
    """What a choice depends on: `rows` = queries of a key/value head, `lanes` = sequences times key/value heads.

    `in_fp32`: queries are float32, in which tiles of all formats are then read.
    """

    arch: str
    formats: tuple[str, ...]
    dims: tuple[int, int, int]
    rows: int
    lanes: int
    tokens: int
    in_fp32: bool = False

    @property
    def family(self) -> str:
        """The part of the key that must be equal; two formats are the latent layout, three the per-head one."""
        dims = "x".join(str(d) for d in self.dims)
        # Of what is stored in float32 queries are too.
        queries = "fp32:" if self.in_fp32 and "fp32" not in self.formats else ""
        return f"{self.arch}|{queries}{'+'.join(self.formats)}|{dims}|{next_power_of_2(self.rows)}"

    @property
    def key(self) -> str:
        """The table's key: `arch|formats|dims|rows|lanes|tokens`, the last three as powers of two above.

        Formats read by queries in float32 begin with `fp32:`.
        """
        return f"{self.family}|{next_power_of_2(self.lanes)}|{next_power_of_2(self.tokens)}"


@dataclass(frozen=True)
class DecodeConfig:
    """One launch config: a program reads `block_tokens` at a time for `block_rows` queries.

    `n_splits` programs share a sequence's key/value head. `packed_math` dequantises with instructions that
    take several codes at once, which 16-bit queries on an NVIDIA GPU can have. `n_registers` is the most that a thread
    may take (0: as many as the compiler wants): what it wants is decided by the rare masked tiles at the end.
    `n_heads` is how many key/value heads of quantised streams a program reads together, codes going to products by words
    and scales to the products' results; 1 of a latent has its codes scaled by words (0: one, of which blocks are made into
    scaled numbers in a tile of shared memory).
    `in_cuda` is how many blocks of a kernel of `caramba.kernels.cuda` a multiprocessor's registers are to have place for
    (0: Triton's kernels). There each warp reads tiles of its own, of which it holds `n_stages`. Where such a kernel cannot
    be had `in_triton` takes its place. `variant` selects one of a kernel's equal
    implementations: of nf4's values two chunks, one or none go by a table in shared memory (2, 1, 0); products of
    a latent are those of Hopper's groups of warps (1) or of each warp by itself (0).
    `early_join` launches what joins the splits while the last of them end, where the device can. Behind Triton's splits
    that took less time in all that was measured, behind some in CUDA 1 us more.
    """

    block_rows: int = 16
    block_tokens: int = 64
    n_warps: int = 4
    n_stages: int = 3
    n_splits: int = 1
    packed_math: bool = True
    n_registers: int = 0
    n_heads: int = 0
    in_cuda: int = 0
    variant: int = 0
    early_join: bool = True

    @property
    def in_triton(self) -> DecodeConfig:
        """The Triton config in place of a CUDA one, with as many splits: blocks read by words, the best as measured."""
        latent = {"block_rows": max(16, self.block_rows), "n_heads": 1}
        heads = {"block_rows": TOGETHER_ROWS, "n_heads": MOST_TOGETHER}
        sizes = latent if self.n_heads == 1 else heads
        return DecodeConfig(n_splits=self.n_splits, n_registers=168, **sizes)

    @property
    def reading(self) -> DecodeConfig:
        """How a tile is read, which is a matter of the format and hardly of how much there is."""
        return replace(self, n_splits=1, early_join=True)


@functools.cache
def measured() -> dict[str, DecodeConfig]:
    """Return the table that is shipped."""
    rows = json.loads(TABLE.read_text())["choices"]
    return {key: DecodeConfig(**choice) for key, choice in rows.items()}


def load_tuned(choices: dict[str, dict[str, int | bool]]) -> None:
    """Put choices that were measured on this machine before those that are shipped.

    Raises:
        TypeError: a field that a choice has not.
        ValueError: a size that no kernel can have.
    """
    made = {key: DecodeConfig(**choice) for key, choice in choices.items()}
    for choice in made.values():
        for name, size in asdict(choice).items():
            may_be_0 = ("packed_math", "n_registers", "n_heads", "in_cuda", "variant", "early_join")
            least = 0 if name in may_be_0 else 1
            if not isinstance(size, int) or size < least:
                raise ValueError(f"{name} is {size!r}, expected a whole number of {least} or more")
            is_any = name == "n_warps" and choice.in_cuda
            if name in ("block_rows", "block_tokens", "n_warps", "n_heads") and size & (size - 1) and not is_any:
                raise ValueError(f"{name} is {size!r}, expected a power of two")
    measured().update(made)
    choose.cache_clear()


@functools.lru_cache(4096)  # every layer of a step asks the same
def choose(shape: DecodeShape, n_processors: int, in_cuda: bool = True) -> DecodeConfig:
    """Return what was measured for a shape; else the nearest one's of its family, or the rule's choice.

    Up to a factor of two away the splits are scaled so that sequences times splits stay, further away they are the
    rule's and the tiles are read as there. Of more tokens than were measured splits in CUDA stay as long, as far as
    there are processors for more: their warps take few tiles each, and one more would make all wait for it. Quantised
    streams of which nothing was measured are read in CUDA on Hopper, where those measured were 1.3 to 5 times as fast
    so, if they can be (`in_cuda`).
    """
    table = measured()
    exact = table.get(shape.key)
    if exact is not None:
        return exact
    near = [(key, choice) for key, choice in table.items() if key.rpartition("|")[0].rpartition("|")[0] == shape.family]
    if near:
        # Of two as near the shorter one: sequences rarely fill what is allocated.
        key, choice = min(near, key=lambda item: (_distance(item[0], shape), int(item[0].rpartition("|")[2])))
        if _distance(key, shape) <= REACH:
            lanes, tokens = (int(number) for number in key.split("|")[-2:])
            scaled = max(1, round(choice.n_splits * lanes / next_power_of_2(shape.lanes)))
            if choice.in_cuda and scaled >= FEW_READERS and shape.tokens > tokens:
                as_long = math.ceil((scaled - 1) * shape.tokens / tokens) + 1  # the last has the tail
                places = choice.in_cuda * n_processors // _programs(shape, choice)
                scaled = max(scaled, min(as_long, places))
            return replace(choice, n_splits=min(scaled, _most_splits(shape.tokens, choice.block_tokens)))
        return replace(choice, n_splits=_splits(shape, choice, n_processors))
    first = rule(shape, n_processors)
    usual = None
    if in_cuda and shape.arch == "sm90" and _is_of_blocks(shape):
        n_tokens = shape.lanes * shape.tokens
        usual = cuda.heuristic_config(first.reading, shape.formats, shape.dims, shape.rows, n_tokens, SM_BYTES)
    return first if usual is None else replace(usual, n_splits=_splits(shape, usual, n_processors))


def rule(shape: DecodeShape, n_processors: int) -> DecodeConfig:
    """Return a choice without measurements: as many splits as the multiprocessors run at once."""
    if _is_grouped(shape):
        grouped = DecodeConfig(block_rows=GROUP_ROWS)  # what was measured for every such shape of the table
        return replace(grouped, n_splits=_splits(shape, grouped, n_processors))
    block_rows = min(64, max(16, next_power_of_2(shape.rows)))
    exact = not _is_quantised(shape)
    wide = max(shape.dims) > 256 or is_in_fp32(shape)
    block_tokens = 32 if wide else 64 if exact or max(shape.dims) > 128 else 128
    reading = DecodeConfig(
        block_rows=block_rows,
        block_tokens=block_tokens,
        n_warps=8 if block_rows == 64 else 4,
        n_stages=2 if wide else 3,
    )
    reading = _fitting(shape, reading)
    return replace(reading, n_splits=_splits(shape, reading, n_processors))


def candidates(shape: DecodeShape, n_processors: int, in_cuda: bool = False) -> list[DecodeConfig]:
    """Return the choices worth timing for a shape, the rule's first, then reading by reading with more splits each.

    Those of `caramba.kernels.cuda` come first, if it has a compiler here (`in_cuda`), and last with a join that does not
    begin early.
    """
    first = rule(shape, n_processors)
    found = {first: None}
    readings = [(first.block_rows, *way) for way in READINGS[_is_quantised(shape)]]
    widths = [max(16, next_power_of_2(width)) for width in shape.dims[: len(shape.formats)]]
    if not _is_quantised(shape) and not is_in_fp32(shape) and sum(widths) <= NARROW:
        readings += [(first.block_rows, *way) for way in OF_NARROW_HEADS]
    if GROUP_ROWS // 4 < shape.rows <= GROUP_ROWS // 2:
        readings += [(GROUP_ROWS, *way) for way in GROUPED]
    ways = []
    n_heads = min(MOST_TOGETHER, TOGETHER_ROWS // next_power_of_2(shape.rows))
    if n_heads > 1 and _is_per_head_of_blocks(shape):
        ways += [(n_heads, TOGETHER_ROWS, *way) for way in TOGETHER]
    if _is_latent_of_words(shape):
        ways += [(1, min(first.block_rows, MOST_ROWS_OF_WORDS), *way) for way in BY_WORDS]
    ways += [(0, *way) for way in readings]
    made = [
        replace(
            first,
            block_rows=block_rows,
            block_tokens=block_tokens,
            n_warps=n_warps,
            n_stages=n_stages,
            n_registers=n_registers,
            n_heads=n_heads,
        )
        for n_heads, block_rows, block_tokens, n_warps, n_stages, n_registers in ways
    ]
    if in_cuda and _is_of_blocks(shape):
        made = [*cuda.candidates(first.reading, shape.formats, shape.dims, shape.rows, SM_BYTES), *made]
    for reading in made:
        per_sms = [n * reading.in_cuda for n in cuda.COUNTED] if reading.in_cuda else COUNTED_PER_SM
        counts = [_splits(shape, reading, n_processors, per_sm) for per_sm in per_sms]
        if reading.in_cuda:
            # With one fewer the tails' blocks run together with the others.
            counts += [n - 1 for n in counts if n > FEW_READERS]
        found |= dict.fromkeys(replace(reading, n_splits=n) for n in counts)
    late = [replace(way, early_join=False) for way in found if way.in_cuda and way.n_splits > 1]
    return [*found, *late]


def written(choices: dict[str, DecodeConfig]) -> str:
    """Return the table's file with these choices added to those shipped."""
    merged = {key: asdict(choice) for key, choice in sorted((measured() | choices).items())}
    rows = ",\n".join(f"    {json.dumps(key)}: {json.dumps(choice)}" for key, choice in merged.items())
    return '{\n  "choices": {' + (f"\n{rows}\n  " if rows else "") + "}\n}\n"


def _is_grouped(shape: DecodeShape) -> bool:
    """Whether a latent in 16 bits is read for GROUP_ROWS rows: there, and of widths of which three stages fit."""
    return (
        shape.arch == "sm90"
        and not shape.in_fp32
        and shape.formats in (("bf16", "bf16"), ("fp16", "fp16"))
        and GROUP_ROWS // 4 < shape.rows <= GROUP_ROWS // 2
        and sum(next_power_of_2(width) for width in shape.dims[:2]) <= WIDEST_GROUPED
    )


def _is_quantised(shape: DecodeShape) -> bool:
    return any(kind in BLOCKS for kind in shape.formats)


def _is_per_head_of_blocks(shape: DecodeShape) -> bool:
    """Whether keys and values of heads are all quantised and read in 16 bits, which is what heads together need."""
    return not shape.in_fp32 and len(shape.formats) == 3 and all(kind in BLOCKS for kind in shape.formats)


def _is_of_blocks(shape: DecodeShape) -> bool:
    """Whether all that is read is quantised, for queries in 16 bits, where the CUDA kernels can be had."""
    kinds = [kind for kind in shape.formats if kind != ZEROS]
    return not shape.in_fp32 and shape.arch in EARLY_ARCHS and all(kind in BLOCKS for kind in kinds)


def _is_latent_of_words(shape: DecodeShape) -> bool:
    """Whether a latent and its geometric stream are blocks that can be read by words of 16 bits, 16 to a product."""
    return (
        not shape.in_fp32
        and len(shape.formats) == 2
        and all(kind in BLOCKS for kind in shape.formats)
        and all(
            width == next_power_of_2(width) and width % BLOCKS[kind][0] == 0 and width * BLOCKS[kind][1] >= 32
            for kind, width in zip(shape.formats, shape.dims, strict=False)
        )
    )


def _fitting(shape: DecodeShape, reading: DecodeConfig) -> DecodeConfig:
    """Return a reading with fewer stages, then of fewer rows, then tokens, where shared memory would not hold it."""
    fewer = replace(reading, n_stages=2)
    few_rows = [replace(fewer, block_rows=n, n_warps=4) for n in (32, 16) if n < reading.block_rows]
    ways = [reading, fewer, *few_rows]
    ways += [replace(ways[-1], block_tokens=n) for n in (64, 32, 16) if n < reading.block_tokens]
    return next((way for way in ways if shared_bytes(shape, way) <= SHARED_BYTES - LEEWAY), ways[-1])


def _per_sm(shape: DecodeShape, reading: DecodeConfig) -> int:
    """Return the programs that a multiprocessor runs at once."""
    if reading.in_cuda:
        return reading.in_cuda
    if _is_quantised(shape):
        return PROGRAMS_PER_SM[0]
    itemsize = 4 if is_in_fp32(shape) else 2
    *keys, values = (max(16, next_power_of_2(width)) for width in shape.dims)
    stage = reading.block_tokens * (sum(keys) + (values if len(shape.formats) == 3 else 0))
    rows = reading.block_rows * (sum(keys) + reading.block_tokens)
    return min(PROGRAMS_PER_SM[1], max(1, SHARED_BYTES // ((reading.n_stages * stage + rows) * itemsize)))


def _splits(shape: DecodeShape, reading: DecodeConfig, n_processors: int, per_sm: int | None = None) -> int:
    """Return the most splits that give no processor more than `per_sm` programs, of a tile at least: one program more
    than there is place for takes as long again as all the others."""
    per_sm = per_sm or _per_sm(shape, reading)
    wanted = max(1, per_sm * n_processors // _programs(shape, reading))
    if reading.in_cuda:
        shares = min(wanted, _most_splits(shape.tokens, reading.block_tokens * reading.n_warps))
        return min(MOST_SPLITS, cuda.with_tail(shares, shape.formats))
    return min(wanted, _most_splits(shape.tokens, reading.block_tokens))


def _programs(shape: DecodeShape, reading: DecodeConfig) -> int:
    """Return the programs of a split."""
    return math.ceil(shape.lanes / max(1, reading.n_heads)) * math.ceil(shape.rows / reading.block_rows)


def _most_splits(tokens: int, block_tokens: int) -> int:
    return max(1, min(MOST_SPLITS, math.ceil(tokens / block_tokens)))


def _distance(key: str, shape: DecodeShape) -> float:
    """Return how far a shape is from a measured one, in powers of two: of tokens from what it has, not from the power
    of two above, as a cache of 32,768 tokens and some is read like one of 32,768."""
    _, lanes, tokens = key.rsplit("|", 2)
    of_lanes, of_tokens = int(lanes) / next_power_of_2(shape.lanes), int(tokens) / shape.tokens
    return abs(math.log2(of_lanes)) + abs(math.log2(of_tokens))


def is_in_fp32(shape: DecodeShape) -> bool:
    """Whether a tile holds numbers of float32, which takes twice the shared memory."""
    return shape.in_fp32 or "fp32" in shape.formats


def shared_bytes(shape: DecodeShape, reading: DecodeConfig) -> int:
    """Return the shared memory of a program on Hopper, as compiled kernels have it.

    It holds queries, stages of what is stored, one fewer than are in flight, and a tile of what products cannot read as
    it is stored. Products of a warp group's rows read numbers where they are loaded, so that all stages stay; those of
    fewer rows hold scores. Of heads read together codes go to products as they are stored.
    """
    if reading.in_cuda:
        return cuda.shared_bytes(reading, shape.formats, shape.dims, shape.rows)
    if reading.n_heads and len(shape.formats) == 2:
        stored = sum(_loaded_bytes(kind, width) * width for kind, width in zip(shape.formats, shape.dims, strict=False))
        elements, _, scale = BLOCKS[shape.formats[0]]
        stored += shape.dims[0] / elements * scale  # the latent's scales are read by words of keys, and of values
        numbers = 2 * (reading.block_rows * sum(shape.dims[:2]) + TOGETHER_ROWS * reading.block_tokens)
        return numbers + int((reading.n_stages - 1) * reading.block_tokens * stored)
    if reading.n_heads:
        numbers = reading.block_rows * (reading.n_heads * sum(shape.dims[:2]) + reading.block_tokens) * 2
        stored = 0.0
        for kind, width in zip(shape.formats, shape.dims, strict=True):
            elements, code, scale = BLOCKS[kind]
            stored += reading.n_heads * (width * code + max(1, width // elements) * scale)
        return numbers + int((reading.n_stages - 1) * reading.block_tokens * stored)
    widths = [max(16, next_power_of_2(width)) for width in shape.dims]
    itemsize = 4 if is_in_fp32(shape) else 2
    is_grouped = reading.block_rows >= GROUP_ROWS
    total = reading.block_rows * sum(widths[:2]) * itemsize
    if not is_grouped:
        total += reading.block_rows * reading.block_tokens * itemsize
    for kind, width, padded in zip(shape.formats, shape.dims, widths, strict=False):
        tile, stored = reading.block_tokens * padded, _loaded_bytes(kind, width)
        is_read = stored == itemsize
        total += int((reading.n_stages - (not (is_grouped and is_read))) * tile * stored)
        total += 0 if is_read else tile * itemsize
    return total


def _loaded_bytes(kind: str, width: int) -> float:
    """Return the bytes that are loaded of an element of a head, with its share of a scale."""
    if kind in NUMBER_BYTES:
        return NUMBER_BYTES[kind]
    elements, code, scale = BLOCKS[kind]
    if width % elements == 0:
        return code + scale / elements
    # A byte of codes is loaded for each code in it, and where heads cross blocks each has its own scale.
    return 1 + (scale / width if elements % width == 0 else scale)


def next_power_of_2(n: int) -> int:
    """Return the power of two from n on."""
    return 1 << max(0, n - 1).bit_length()
