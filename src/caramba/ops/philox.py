"""Random numbers that are a function of a seed and a place, so that a backward can draw them again."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
LEVELS = 2**16
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


def kept(seed: int, p: float, rows: int, width: int, device: torch.device) -> Tensor:
    """Return which elements dropout keeps, bool [rows, width], each with probability 1 - p for p to within 2^-17.

    One counter serves eight elements: (i, j) is dropped when half j mod 8, the lower one of a word before the upper,
    of the words of counter (j div 8, i mod 2^32, i div 2^32, 0) is below round(2^16 p).
    """
    row = torch.arange(rows, device=device, dtype=torch.int64)[:, None]
    octet = torch.arange(-(-width // 8), device=device, dtype=torch.int64)[None, :]
    words = philox(seed, (octet, row & MASK, row >> 32, torch.zeros_like(octet)))
    halves = torch.stack([half for word in words for half in (word % LEVELS, word // LEVELS)], dim=-1)
    return (halves.flatten(-2)[:, :width] >= round(p * LEVELS)).contiguous()


def halves(seed: Tensor, number: int, start: int, count: int) -> Tensor:
    """Return 16 random bits for each element from `start`, a multiple of 2048, on of tensor `number`, int32 [count].

    One counter serves eight elements, four neighbours of each half of 2048, as a kernel's thread holds them: element
    2048 b + i has of counter k = 256 b + (i mod 1024) div 4, as (k mod 2^32, k div 2^32, number, 0), the word i mod 4,
    its lower half for i < 1024 and its upper one else.

    Shape: seed [], int64.
    """
    device, counters = seed.device, TILE // 8
    first, last = start // TILE, -(-(start + count) // TILE)
    place = torch.arange(first * counters, last * counters, device=device, dtype=torch.int64)
    tensor, zero = (torch.full((1,), value, device=device, dtype=torch.int64) for value in (number, 0))
    words = torch.stack(philox(seed, (place & MASK, place >> 32, tensor, zero)), dim=-1)
    words = words.view(last - first, TILE // 2)
    return torch.stack((words & (LEVELS - 1), words >> 16), dim=1).flatten()[:count].int()


def resolved(p: float) -> float:
    """Return the probability that 16 bits can draw, nearest to p."""
    return round(p * LEVELS) / LEVELS
