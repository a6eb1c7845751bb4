"""Rows of one allocation that go on by themselves, and a forward in which each stands at its own length."""

from __future__ import annotations

import pytest
import torch
from tests.unit.model.model_specs import transformer

from caramba.cache import DeviceContext, KVCacheKind
from caramba.cache.device_context import IDLE
from caramba.errors import ConfigError
from caramba.model import Model, build_model


@pytest.fixture(scope="module")
def model() -> Model:
    return build_model(transformer("latent_gate", repeat=1), seed=0).double().eval()


@torch.no_grad()
def test_rows_of_unequal_length_step_as_if_alone(model: Model) -> None:
    prompts, steps = ([1, 2, 3, 4, 5], [6], [7, 8]), torch.tensor([[9, 10, 11, 12], [3, 2, 1, 0]])
    ctx = model.new_context(4, 16, static=True)
    for cache in ctx.caches:
        for buffer in cache.allocations:
            buffer.fill_(float("nan"))
    for slot, prompt in zip((0, 2, 3), prompts, strict=True):
        model(torch.tensor([prompt]), ctx.row(slot))
    step = DeviceContext.slots(ctx)
    step.set_lengths([5, IDLE, 1, 2])
    found = [model(tokens[:, None], step)[:, 0] for tokens in steps]
    assert step.device_lengths.tolist() == [7, IDLE, 3, 4]
    for slot, prompt in zip((0, 2, 3), prompts, strict=True):
        whole = model(torch.tensor([[*prompt, *steps[:, slot].tolist()]]))[0, len(prompt) :]
        torch.testing.assert_close(torch.stack(found)[:, slot], whole, rtol=1e-5, atol=1e-6)  # an fp32 cache
    # Nothing was written for the idle row, nor behind the others.
    for cache in ctx.caches:
        for buffer in cache.allocations:
            assert buffer[1].isnan().all()
            assert all(row[:, n:].isnan().all() for row, n in zip(buffer, (7, 0, 3, 4), strict=True))
            assert not buffer[0, :, :7].isnan().any()


@torch.no_grad()
def test_a_row_shares_memory_and_is_cleared_alone(model: Model) -> None:
    for kind in (KVCacheKind.FP32, KVCacheKind.Q8_0):
        ctx = model.new_context(2, 200, kind, static=True, tail_tokens=4)
        first, second = ctx.row(0), ctx.row(1)
        for row in (first, second):
            model(torch.arange(11)[None], row)
        assert (first.position, ctx.position, ctx.nbytes()) == (11, 0, first.nbytes() + second.nbytes())
        kept = second.state_dict()
        first.clear()
        assert first.position == 0
        for cache in ctx.caches:
            assert all(not part[0].any() and part[1].any() for part in cache.memory)
        assert all(torch.equal(values, kept[name]) for name, values in second.state_dict().items())


def test_caches_that_cannot_be_stepped_say_why(model: Model) -> None:
    with pytest.raises(ConfigError, match="grows shares no memory; make it with static=True"):
        model.new_context(2, 8).row(0)
    rotated = model.new_context(2, 300, KVCacheKind.Q4_0, static=True, hadamard=True)
    with pytest.raises(ConfigError, match="Hadamard-rotated"):
        DeviceContext.slots(rotated)
