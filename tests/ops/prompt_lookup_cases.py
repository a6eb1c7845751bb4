"""Texts in the middle of a round of prompt lookup, for the tests of `prompt_lookup_step`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

K = 7


@dataclass
class LookupCase:
    """Arguments of one call."""

    ids: Tensor
    held: Tensor
    state: Tensor
    drawn: Tensor
    live: Tensor
    most: int
    max_ngram: int
    extra: bool

    def on(self, device: str) -> LookupCase:
        """Return a copy of it on a device."""
        names = ("ids", "held", "state", "drawn", "live")
        return replace(self, **{name: getattr(self, name).clone().to(device) for name in names})

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, bool]:
        return (
            *(self.ids, self.held, self.state, self.drawn, self.live),
            *(self.most, self.max_ngram, self.extra),
        )


def lookup_case(seed: int, lengths: list[int], n_ids: int, width: int) -> LookupCase:
    """Return rows of some lengths after a forward of `width` tokens, over so few tokens that runs repeat."""
    random = torch.Generator().manual_seed(seed)
    n_rows, vocab = len(lengths), 2 + seed % 3

    def some(*shape: int) -> Tensor:
        return torch.randint(vocab, shape, generator=random)

    # What lies behind a text is no token of it, and must count for nothing.
    ids = some(n_rows, n_ids)
    state = torch.cat((torch.arange(n_rows)[:, None] % 3, some(n_rows, 1 + K)), dim=1)
    drawn = torch.cat((state[:, 2 : 1 + width], some(n_rows, 1)), dim=1)
    changed = torch.rand(drawn.shape, generator=random) < 0.15
    return LookupCase(
        ids,
        torch.tensor(lengths, dtype=torch.int32) + width - 1,
        state,
        torch.where(changed, some(*drawn.shape), drawn),
        torch.arange(n_rows) != 1,
        most=1 + seed % K,
        max_ngram=1 + seed % 5,
        extra=seed % 2 == 0,
    )
