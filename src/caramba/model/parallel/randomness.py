"""Separate random numbers per rank in layers that are split over equally seeded ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from caramba.layer.score import CausalScore
from caramba.model.parallel.local import add_mixin, rank_share


@contextlib.contextmanager
def rank_rng(device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """Use a separate random stream for this rank on `device`, and restore the shared one on exit.

    Equally seeded ranks stay in step: all draw the same seeds on the host, without synchronising, and each uses its
    own. Activation checkpointing restores the shared stream, so recomputation draws the same numbers.
    """
    seeds = torch.randint(2**63 - 1, (dist.get_world_size(group),))
    streams = torch if device.type == "cpu" else torch.get_device_module(device)
    before = streams.get_rng_state()
    streams.manual_seed(int(seeds[dist.get_rank(group)]))
    try:
        yield
    finally:
        streams.set_rng_state(before)


def use_rank_dropout(score: CausalScore) -> None:
    """Give each rank's heads separate attention dropout.

    Such an attention is excluded from compilation, because the host changes the random stream.
    """
    if score.dropout > 0:
        add_mixin(score, _dropout_mixin())


def _attend(self: Any, q: Tensor, *rest: Any) -> Tensor:
    if not self.training:
        return CausalScore.forward(self, q, *rest)
    with rank_rng(q.device, rank_share(self).group):
        return CausalScore.forward(self, q, *rest)


@functools.cache
def _dropout_mixin() -> type:
    # Created on first use: this imports torch's compiler, which most processes do not need.
    return type("OwnDropout", (), {"forward": torch.compiler.disable(_attend)})
