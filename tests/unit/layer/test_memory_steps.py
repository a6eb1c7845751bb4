"""Steps of memory slots on the device equal those that the host drives, in place and at fixed addresses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.examples import is_thorough
from tests.unit.layer.test_memory_bank import LENGTH, VARIANTS, memory_model, tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from caramba.cache import Context, DeviceContext, KVCacheKind
from caramba.config.memory_bank import SPARE_TOKENS
from caramba.errors import ConfigError
from caramba.infer import Generator
from caramba.infer.device_steps import capture_graph, next_logits, replay_graph, step_refusal
from caramba.model import Model

CAPACITY = 7 + SPARE_TOKENS
PROMPTS = [0, 3, 8, CAPACITY - 1, CAPACITY, 41]
"""Shorter than the window, between it and the ring, as long as the ring, and longer."""


def prompted(model: Model, x: Tensor, n: int, **options: Any) -> Context:
    ctx = model.new_context(x.shape[0], LENGTH, static=True, **options)
    if n:
        model(x[:, :n], ctx)
    return ctx


def stepped(model: Model, x: Tensor, step: DeviceContext) -> Tensor:
    outputs = []
    for token in x[:, step.ctx.position :].split(1, dim=1):
        step.advance()
        outputs.append(model(token, step))
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def test_tokens_without_their_slots_are_refused() -> None:
    cache = prompted(memory_model(), tokens(), 3).caches[0]
    with pytest.raises(ConfigError, match="store them by put"):
        cache.append(cache.read())


@pytest.mark.parametrize(
    ("n", "changes"),
    [(n, changes) for n in PROMPTS for changes in VARIANTS if is_thorough or n == CAPACITY or changes == VARIANTS[0]],
)
@torch.no_grad()
def test_device_steps_equal_full_forward(n: int, changes: dict[str, Any]) -> None:
    model, x = memory_model(**changes), tokens()
    full, ctx = model(x), prompted(model, x, n)
    addresses = [part.data_ptr() for cache in ctx.caches for part in cache.memory]
    found = stepped(model, x, DeviceContext(ctx))
    torch.testing.assert_close(found, full[:, n:], atol=1e-5, rtol=1e-5)
    assert [part.data_ptr() for cache in ctx.caches for part in cache.memory] == addresses
    host = prompted(model, x, n)
    for token in x[:, n:].split(1, dim=1):
        model(token, host)
    for key, wanted in host.state_dict().items():
        torch.testing.assert_close(ctx.state_dict()[key], wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_host_continues_after_device_steps_and_the_device_after_the_host() -> None:
    model, x = memory_model(), tokens()
    full, ctx = model(x), prompted(model, x, 20)
    step = DeviceContext(ctx)
    found = {20: stepped(model, x[:, :45], step), 45: model(x[:, 45:62], ctx)}
    step.sync_from_host()
    stepped(model, tokens(62 + SPARE_TOKENS, seed=9), step)
    step.truncate(62)
    found[62] = stepped(model, x[:, :80], step)
    restored = model.new_context(2, LENGTH)
    restored.load_state_dict(ctx.state_dict())
    found[80] = model(x[:, 80:], ctx)
    for start, part in found.items():
        torch.testing.assert_close(part, full[:, start : start + part.shape[1]], atol=1e-5, rtol=1e-5)
    assert torch.equal(model(x[:, 80:], restored), found[80])
    with pytest.raises(ConfigError, match="cannot roll 90 tokens back"):
        ctx.truncate(LENGTH - SPARE_TOKENS - 1)


@pytest.mark.parametrize("n", [5, 41])
@torch.no_grad()
def test_a_repeated_step_leaves_what_one_leaves(n: int) -> None:
    """A capture runs a step several times before the first that counts."""
    model, x = memory_model(), tokens()
    full, ctx = model(x), prompted(model, x, n)
    step = DeviceContext(ctx)
    outputs = []
    for t in range(n, LENGTH):
        step.advance()
        for _ in range(3):
            step.device_lengths.fill_(t)
            out = model(x[:, t : t + 1], step)
        outputs.append(out)
    torch.testing.assert_close(torch.cat(outputs, dim=1), full[:, n:], atol=1e-5, rtol=1e-5)


class Recorded(TorchDispatchMode):
    """Keeps what runs: each operator, with the shapes and numbers that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map_only(Tensor, lambda x: (tuple(x.shape), x.dtype), (args, kwargs))
        self.calls.append(f"{func} {given}")
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_a_step_is_the_same_work_at_every_position_and_reads_no_number_on_the_host() -> None:
    model, x = memory_model(memory_read="gated", use_adaptive_compression=True), tokens()
    step, seen = DeviceContext(prompted(model, x, 3)), []
    for token in x[:, 3 : CAPACITY + 9].unbind(1):
        step.advance()
        with Recorded() as recorded:
            next_logits(model, token, step)
        seen.append(recorded.calls)
    assert all(calls == seen[0] for calls in seen)
    waits = (
        "_local_scalar_dense",
        "nonzero",
        "is_nonzero",
        "equal.",
        "lift_fresh",
        "unique",
        "masked_select",
    )
    assert not [call for call in seen[0] if any(name in call for name in waits)]


@torch.no_grad()
def test_bfloat16_steps_are_near_the_host_steps() -> None:
    model, x = memory_model().bfloat16(), tokens()
    full = model(x).float()[:, 41:]
    found = stepped(model, x, DeviceContext(prompted(model, x, 41, kind=KVCacheKind.BF16))).float()
    assert (found - full).norm() < 2e-2 * full.norm()


def test_rows_at_positions_of_their_own_are_refused() -> None:
    model = memory_model()
    ctx = model.new_context(2, LENGTH, static=True)
    match = "decode step on the device: a layer with memory slots needs all rows at one position; decode with"
    for make in (DeviceContext.slots, lambda ctx: DeviceContext.ragged(ctx, [0, 0])):
        with pytest.raises(ConfigError, match=match):
            make(ctx)
    assert step_refusal(model, ctx) is None
    assert "one position" in (step_refusal(model, ctx, has_slots=True) or "")


@pytest.mark.compile
def test_compiled_generation_says_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda fn, **keys: compiler(fn, fullgraph=True, backend="aot_eager"))
    model, prompts = memory_model(), [[1, 2, 3, 4] * 3, [5, 6, 7]]
    values: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
    plain = Generator(model, compiled=False, **values).generate(prompts)
    generator = Generator(model, compiled=True, **values)
    for _ in range(2):  # the second in the same memory, emptied
        assert [row.tokens for row in generator.generate(prompts)] == [row.tokens for row in plain]
        assert (generator.stats.decode, generator.stats.not_compiled) == ("compiled", None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("changes", [VARIANTS[0], VARIANTS[1], VARIANTS[-1]])
@pytest.mark.parametrize("n", [5, 41])
@torch.inference_mode()
def test_captured_steps_equal_full_forward(n: int, changes: dict[str, Any]) -> None:
    from caramba import kernels

    kernels.load("cuda")
    model, x = memory_model(head_dim=16, **changes).cuda(), tokens().cuda()
    full, ctx = model(x), prompted(model, x, n)
    step = DeviceContext(ctx)

    def run(token: Tensor) -> Tensor:
        return next_logits(model, token, step)

    def trial(token: Tensor) -> Tensor:
        step.device_lengths.fill_(n)
        return run(token)

    graph = capture_graph(x[:, n], run, trial)
    step.device_lengths.fill_(n)
    outputs = torch.empty_like(full[:, n : LENGTH - 10])
    taken = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for t in range(n, LENGTH - 10):
        step.advance()
        outputs[:, t - n].copy_(replay_graph(graph, x[:, t]))
    # Less where Python has collected what tests before left.
    assert torch.cuda.memory_reserved() <= taken[0]
    assert torch.cuda.memory_allocated() <= taken[1]
    torch.testing.assert_close(outputs, full[:, n : LENGTH - 10], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(x[:, -10:], ctx), full[:, -10:], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", ["graph", True])
def test_captured_generation_says_the_same_tokens(compiled: bool | str) -> None:
    model, prompts = memory_model(head_dim=16).cuda(), [[1, 2, 3, 4] * 3, [5, 6, 7]]
    values: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0}
    plain = Generator(model, compiled=False, **values).generate(prompts)
    generator = Generator(model, compiled=compiled, **values)
    for _ in range(2):
        assert [row.tokens for row in generator.generate(prompts)] == [row.tokens for row in plain]
    assert generator.stats.decode == ("graph" if compiled == "graph" else "compiled graph")
    assert generator.stats.not_compiled is None
