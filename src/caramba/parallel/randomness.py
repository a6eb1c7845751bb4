"""Random numbers of a rank's own, in a layer that is shared by ranks whose streams are otherwise the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from caramba.layer.score import CausalScore
from caramba.parallel.local import add_mixin, rank_share


@contextlib.contextmanager
def rank_rng(device: torch.device, group: dist.ProcessGroup) -> Iterator[None]:
    """Draw on `device` from a stream of this rank's own, and go on with the shared one afterwards.

    Ranks that are seeded alike stay so: each takes its own of the seeds that all draw, on the host, so that no device
    is waited for. What is computed again in backward (activation checkpointing puts the shared stream back) draws the
    same numbers again.
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
    """Let a rank's heads drop other probabilities than those of other ranks, which draw the same numbers elsewhere.

    Compiled code leaves such an attention out: the streams are changed by the host.
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
    # Made when it is needed: this loads torch's compiler, which most processes do without.
    return type("OwnDropout", (), {"forward": torch.compiler.disable(_attend)})
