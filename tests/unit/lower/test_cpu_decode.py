"""Steps of one token on a CPU: the numbers of the layers by fewer calls, and who keeps the layers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.unit.lower.test_norm_linear import Ops
from tests.unit.model.model_specs import VOCAB, biased, transformer
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext, KVCacheKind
from caramba.errors import CacheFull
from caramba.layer.documents import Documents
from caramba.lower.cpu_decode import CpuDecode
from caramba.lower.lowering import lower
from caramba.model import Model, build_model
from caramba.model.topology import ResidualTopology, Topology

NAMES = [
    "gqa_scaled",
    "bottleneck",
    "window",
    "decoupled_gate",
    "latent",
    "latent_first",
    "no_rope",
    "biased",
]


def lively(name: str, dtype: torch.dtype = torch.float64) -> Model:
    model = build_model(biased() if name == "biased" else transformer(name), seed=0).eval().to(dtype)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.2)
    return model


@torch.inference_mode()
def logits(model: Model, batch: int = 2, *, joined: bool = True) -> tuple[Tensor, Counter[str]]:
    """Logits of three steps behind a prompt, and the ops of these steps."""
    tokens = torch.randint(VOCAB, (batch, 9), generator=torch.Generator().manual_seed(1))
    ctx = model.new_context(batch, 9, KVCacheKind.FP32, static=True)
    model(tokens[:, :6], ctx)
    with lower(model, "cpu", "decode") if joined else torch.no_grad(), Ops() as ops:
        rows = [model(tokens[:, at : at + 1], ctx) for at in range(6, 9)]
    return torch.cat(rows, dim=1), ops.ran


NORM_OPS = ("mul", "sum", "div_", "add_", "rsqrt_", "mul", "mul_")


def stepping(model: Model) -> list[Topology]:
    return [module for module in model.modules() if isinstance(module, CpuDecode)]


@pytest.mark.parametrize("name", NAMES)
def test_a_step_gives_the_logits_of_the_layers_by_fewer_ops(name: str) -> None:
    model = lively(name)
    for batch in (1, 3):
        got, ran = logits(model, batch)
        want, by_layers = logits(model, batch, joined=False)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # the cache holds float32
        assert ran["addmm"] > by_layers["addmm"]  # sums behind products are theirs
        # `rms_norm` calls these ops itself, out of the mode's sight.
        hidden = (len(NORM_OPS) - 1) * by_layers["rms_norm"]
        assert sum(ran.values()) <= sum(by_layers.values()) + hidden


def test_in_float32_too_and_the_whole_topology_is_one_step() -> None:
    model = lively("gqa_scaled", torch.float32)
    torch.testing.assert_close(logits(model)[0], logits(model, joined=False)[0], rtol=1e-5, atol=1e-5)
    with lower(model, "cpu", "decode"):
        assert stepping(model) == [model.topology]
    assert stepping(model) == []


def test_weights_changed_in_place_inside_a_block_count() -> None:
    model = lively("gqa_scaled")
    tokens = torch.randint(VOCAB, (1, 4))
    with torch.inference_mode(), lower(model, "cpu", "decode"):
        ctx = model.new_context(1, 4, KVCacheKind.FP32, static=True)
        model(tokens[:, :3], ctx)
        before = model(tokens[:, 3:], ctx)
        ctx.truncate(3)
        with torch.inference_mode(False), torch.no_grad():
            for parameter in model.topology.parameters():
                parameter.mul_(1.5)
        after = model(tokens[:, 3:], ctx)
        ctx.truncate(3)
    with torch.inference_mode():
        torch.testing.assert_close(after, model(tokens[:, 3:], ctx), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after, before, rtol=1e-3)


def test_layers_that_are_watched_or_replaced_run_as_they_are() -> None:
    watched, replaced, half = lively("gqa_scaled"), lively("gqa_scaled"), lively("gqa_scaled", torch.bfloat16)
    name, layer = watched.attention_layers()[0]
    seen: list[nn.Module] = []
    layer.register_forward_hook(lambda module, *_: seen.append(module))
    others = logits(lively("gqa_scaled"))[0]
    torch.testing.assert_close(logits(watched)[0], others, rtol=1e-6, atol=1e-6)
    assert seen == [layer] * 4, name  # the prompt's forward and every step's
    for _, other in replaced.attention_layers():
        other.out = nn.Sequential(other.out)  # type: ignore[assignment]
    torch.testing.assert_close(logits(replaced)[0], others, rtol=1e-6, atol=1e-6)
    with lower(half, "cpu", "decode"):
        assert stepping(half) == []


class Doubled(ResidualTopology):
    """A block whose own forward counts its calls and doubles what the layers add."""

    calls = 0

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        self.calls += 1
        return x + 2 * self.run(x, ctx)


def test_what_has_a_forward_of_its_own_runs_it_in_every_step() -> None:
    model = lively("gqa_scaled")
    block = next(module for module in model.modules() if type(module) is ResidualTopology)
    block.__class__ = Doubled
    doubled = logits(model)[0]
    assert block.calls == 4  # the prompt's forward and every step's
    torch.testing.assert_close(doubled, logits(model, joined=False)[0], rtol=1e-6, atol=1e-6)
    wanted = logits(lively("gqa_scaled"))[0]
    for index in range(5):
        model = lively("gqa_scaled")
        attention = model.attention_layers()[0][1]
        block = next(one for one in model.modules() if isinstance(one, ResidualTopology))
        part = (block, block.layers[0], attention, attention.projection, attention.out)[index]
        given, seen = part.forward, list[nn.Module]()
        part.forward = lambda *inputs, part=part, given=given, seen=seen, **named: (
            seen.append(part),
            given(*inputs, **named),
        )[1]
        torch.testing.assert_close(logits(model)[0], wanted, rtol=1e-6, atol=1e-6)
        assert seen == [part] * 4


def test_gradients_and_autocast_take_the_layers_and_a_full_cache_is_refused() -> None:
    model = lively("gqa_scaled", torch.float32)
    tokens = torch.randint(VOCAB, (1, 4))
    ctx = model.new_context(1, 4, KVCacheKind.FP32, static=True)
    with lower(model, "cpu", "decode"):
        with torch.no_grad():
            model(tokens[:, :3], ctx)
            with Ops() as ops, torch.autocast("cpu", torch.bfloat16):
                model(tokens[:, 3:], ctx)
            assert ops.ran["addmm"] == 0
            with pytest.raises(CacheFull, match="5 tokens do not fit max_tokens=4"):
                model(tokens[:, :1], ctx)
        assert ctx.position == 4
        assert model(tokens[:, :1]).requires_grad
