"""Exchanges at the borders of a split layer, compiled: gradients go back through them as they do uncompiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from caramba.model.parallel.collectives import (
    copy_to_region,
    gather_sequence,
    reduce_from_region,
    scatter_sequence,
)

EXCHANGES: dict[str, Callable[[Tensor, dist.ProcessGroup], Tensor]] = {
    "copy_to_region": copy_to_region,
    "reduce_from_region": reduce_from_region,
    "gather_sequence": lambda x, group: gather_sequence(x, group, is_summed=False),
    "gathered_summed": lambda x, group: gather_sequence(x, group, is_summed=True),
    "scatter_sequence": lambda x, group: scatter_sequence(x, group, is_summed=False),
    "scattered_summed": lambda x, group: scatter_sequence(x, group, is_summed=True),
}


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_compiled_exchange_has_the_gradient_of_an_eager_one(group: dist.ProcessGroup, name: str) -> None:
    """torch 2.11 gives zeros for a function whose result is also a tensor on its way, and says nothing."""
    exchange = EXCHANGES[name]
    weight = torch.arange(1.0, 10.0, dtype=torch.float64).view(3, 3).requires_grad_()
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(1, 4, 3)

    def layer(x: Tensor) -> Tensor:
        return torch.tanh(exchange(x @ weight, group))

    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    (expected,) = torch.autograd.grad(layer(x).sum(), weight)
    (found,) = torch.autograd.grad(compiled(x).sum(), weight)
    assert expected.abs().min() > 0
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
