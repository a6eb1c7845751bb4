"""The decode loop: prefill in chunks, steps, and greedy against a loop without a cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.cache import KVCacheKind
from caramba.config.model import ModelSpec
from caramba.errors import CarambaError, ConfigError
from caramba.infer import decode_step, greedy, prefill
from caramba.model import Model, build_model

PROMPT = torch.randint(19, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=["standard", "decoupled"])
def model(request: pytest.FixtureRequest) -> Model:
    extra = {"mode": "decoupled", "sem_dim": 8, "geo_dim": 8, "v_dim": 8} if request.param == "decoupled" else {}
    attention = {"type": "AttentionLayer", "d_model": 16, "n_heads": 2, "dropout": 0.3, **extra}
    layers = [{"type": "ResidualTopology", "layers": [{"type": "RMSNormLayer", "d_model": 16}, attention]}]
    built = build_model(
        ModelSpec.model_validate(
            {
                "embedder": {"vocab_size": 19, "d_model": 16},
                "topology": {
                    "type": "StackedTopology",
                    "layers": [{"type": "NestedTopology", "layers": layers, "repeat": 2}],
                },
                "head": {"tied": False},
            }
        ),
        seed=0,
    )
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.mul_(10)
    return built.eval()


def uncached(model: Model, tokens: Tensor, n: int) -> Tensor:
    with torch.no_grad():
        for _ in range(n):
            tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


@pytest.mark.parametrize("chunk", [None, 1, 3, 7, 20])
def test_prefill_and_steps_equal_the_full_forward(model: Model, chunk: int | None) -> None:
    ctx = model.new_context(3, 9)
    logits = [prefill(model, PROMPT, ctx, chunk)]
    extra = torch.tensor([[1, 2], [3, 4], [5, 6]])
    logits += [decode_step(model, extra[:, 0], ctx), decode_step(model, extra[:, 1:], ctx)]
    with torch.no_grad():
        full = model(torch.cat((PROMPT, extra), dim=1))
    assert ctx.position == 9
    torch.testing.assert_close(torch.stack(logits, dim=1), full[:, -3:], rtol=1e-5, atol=1e-5)


def test_greedy_equals_a_loop_without_cache(model: Model) -> None:
    out = greedy(model, PROMPT, 6)
    assert out.shape == (3, 13)
    assert torch.equal(out, uncached(model, PROMPT, 6))
    assert torch.equal(greedy(model, PROMPT, 0), PROMPT)


def test_greedy_runs_in_eval_mode_and_restores(model: Model) -> None:
    expected = greedy(model, PROMPT, 4)
    model.train()
    assert torch.equal(greedy(model, PROMPT, 4), expected)
    assert model.training


def test_greedy_takes_every_kind_but_auto(model: Model) -> None:
    for kind in (KVCacheKind.FP16, KVCacheKind.Q8_0, KVCacheKind.MIXED):
        assert greedy(model, PROMPT, 3, kind).shape == (3, 10)
    with pytest.raises(CarambaError, match=r"kind=auto is a policy that has not been resolved to a format"):
        greedy(model, PROMPT, 3, KVCacheKind.AUTO)


def test_misuse_is_named(model: Model) -> None:
    with pytest.raises(ConfigError, match=r"got 0 tokens"):
        prefill(model, PROMPT[:, :0], model.new_context(3, 4))
    with pytest.raises(ConfigError, match=r"chunk=0"):
        prefill(model, PROMPT, model.new_context(3, 9), 0)
    with pytest.raises(ConfigError, match=r"max_new_tokens=-1"):
        greedy(model, PROMPT, -1)
