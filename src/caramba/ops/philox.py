"""Random numbers that are a function of a seed and a place, so that a backward can draw them again."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

ROUNDS = 7
LEVELS = 2**16
LOWEST = 0xFC00
"""The bits of minus infinity in float16, the lowest number."""
NEGATIVE = 0x7C00
"""Numbers of float16 below zero."""
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF
TILE = 2048
"""Elements that 256 counters of `halves` serve."""


def philox(
    seed: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four 32-bit words for each counter of four: Philox 4x32, keyed by the seed's two halves.

    Seven rounds are the fewest that pass the tests of BigCrush.

    Shape: int64 tensors that broadcast, of values below 2^32, to four of the broadcast shape.

    Reference: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3".
    """
    keys = [seed & MASK, (seed >> 32) & MASK]
    first, second, third, fourth = counter
    for _ in range(rounds):
        # int64 wraps at 2^64, which leaves the bits of both halves of a 32 x 32 product as they are.
        low, high = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first, second = ((high >> 32) & MASK) ^ second ^ keys[0], high & MASK
        third, fourth = ((low >> 32) & MASK) ^ fourth ^ keys[1], low & MASK
        keys = [(key + step) & MASK for key, step in zip(keys, KEY_STEPS, strict=True)]
    return first, second, third, fourth


def dropout_mask(seed: int, p: float, rows: int, width: int, device: torch.device) -> Tensor:
    """Return the dropout mask, True for kept elements: bool [rows, width], each with probability 1 -
    `resolve_probability(p)`.

    One counter serves eight elements: (i, j) takes half j mod 8, the lower one of a word before the upper, of the words
    of counter (j div 8, i mod 2^32, i div 2^32, 0). Of the two fates the rarer, or being dropped, is that of halves
    which as numbers of float16 are below `rare_bound(p)`: kernels compare two such numbers by one instruction, and no
    two whole numbers.
    """
    row = torch.arange(rows, device=device, dtype=torch.int64)[:, None]
    octet = torch.arange(-(-width // 8), device=device, dtype=torch.int64)[None, :]
    words = philox(seed, (octet, row & MASK, row >> 32, torch.zeros_like(octet)))
    halves = torch.stack([half for word in words for half in (word % LEVELS, word // LEVELS)], dim=-1)
    halves = halves.flatten(-2)[:, :width]
    numbers = torch.where(halves < LEVELS // 2, halves, halves - LEVELS).to(torch.int16).view(torch.float16)
    bits, drops = rare_bound(p)
    (bound,) = struct.unpack("<e", bits.to_bytes(2, "little"))
    below = numbers < bound
    return ~below if drops else below


def resolve_probability(p: float) -> float:
    """Return the probability that 16 bits can draw, nearest to p.

    Multiples of 1 / 65536, but for two: of float16's numbers the two zeros are equal, both below another or neither.
    """
    count = round(p * LEVELS)
    if min(count, LEVELS - count) == NEGATIVE + 1:
        count += 1 if count < LEVELS // 2 else -1
    return count / LEVELS


def rare_bound(p: float) -> tuple[int, bool]:
    """Return the float16 bound (as bits) of the rarer outcome of dropout, and whether that outcome drops.

    The share of 16-bit values that are below the bound as float16 is the probability of that outcome.
    """
    count = round(resolve_probability(p) * LEVELS)
    drops = 2 * count <= LEVELS
    count = count if drops else LEVELS - count
    # Upward from minus infinity; beyond its negative numbers and both zeros it counts from the smallest positive one.
    return (LOWEST - count if count <= NEGATIVE else count - NEGATIVE - 1), drops


Piece = tuple[int, int, int]


def halves(seed: Tensor, pieces: Sequence[Piece]) -> list[Tensor]:
    """Return 16 random bits, int32, for each element of pieces of tensors: (number, first element, count), the first
    element a multiple of 2048.

    One counter serves eight elements, four neighbours of each half of 2048, as a kernel's thread holds them: element
    2048 b + i has of counter k = 256 b + (i mod 1024) div 4, as (k mod 2^32, k div 2^32, number, 0), the word i mod 4,
    its lower half for i < 1024 and its upper one else.

    Shape: seed [], int64.
    """
    device, tiles = seed.device, [-(-count // TILE) for _, _, count in pieces]
    counters = [tile * TILE // 8 for tile in tiles]
    ranges = [(start // 8, start // 8 + size) for (_, start, _), size in zip(pieces, counters, strict=True)]
    place = torch.cat([torch.arange(*ends, device=device) for ends in ranges])
    number = torch.cat(
        [torch.full((size,), piece[0], device=device) for piece, size in zip(pieces, counters, strict=True)]
    )
    zero = torch.zeros((1,), dtype=torch.int64, device=device)
    words = torch.stack(philox(seed, (place & MASK, place >> 32, number, zero)), dim=-1).view(-1, TILE // 2)
    bits = torch.stack((words & (LEVELS - 1), words >> 16), dim=1).int()
    parts = bits.split(tiles)
    return [part.flatten()[:count] for part, (_, _, count) in zip(parts, pieces, strict=True)]
