"""Layers of a person's own in a model: built as declared, causal, and decoded as they are trained, or refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from caramba.config.model import ModelSpec
from caramba.config.plugins import activate, use_plugins
from caramba.errors import ConfigError
from caramba.infer.decode import greedy
from caramba.model import Model, build_empty, build_model, check_causal
from caramba.model.custom_layers import refuse_lost_tensors
from caramba.model.topology import build_node

PLUGIN = Path(__file__).parents[2] / "plugin"
NORM: dict[str, Any] = {"type": "RMSNormLayer", "d_model": 16}
CONV: dict[str, Any] = {"type": "GatedConvLayer", "d_model": 16, "kernel": 3}
ATTENTION: dict[str, Any] = {"type": "AttentionLayer", "d_model": 16, "n_heads": 2, "head_dim": 8}


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(PLUGIN)
    monkeypatch.setattr(sys, "path", sys.path[:])
    use_plugins({"plugins": ["gated_conv"]})
    yield
    activate(())


def spec() -> ModelSpec:
    inner = [{"type": "ResidualTopology", "layers": [NORM, layer]} for layer in (CONV, ATTENTION)]
    cyclic = {"type": "CyclicTopology", "n_cycles": 2, "layers": inner}
    layers = [cyclic, {"type": "ScaledLayer", "d_model": 16}, NORM]
    return ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": 61, "d_model": 16},
            "topology": {"type": "StackedTopology", "layers": layers},
        }
    )


def model() -> Model:
    return build_model(spec(), seed=0).eval()


def conv_class() -> type[nn.Module]:
    from gated_conv.layers import GatedConv

    return GatedConv


def test_a_cached_decode_in_any_chunks_equals_the_full_forward() -> None:
    built = model()
    tokens = torch.randint(0, 61, (2, 23), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = built(tokens)
        for sizes in ([23], [1] * 23, [2, 1, 7, 13]):
            ctx = built.new_context(2, 23)
            assert len(ctx.caches) == 4
            parts = [built(part, ctx) for part in tokens.split(sizes, dim=1)]
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)
        ctx.truncate(9)
        torch.testing.assert_close(built(tokens[:, 9:], ctx), whole[:, 9:], atol=1e-5, rtol=1e-5)


def test_greedy_text_is_that_of_full_forwards() -> None:
    built = model()
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    slow = tokens
    with torch.no_grad():
        for _ in range(6):
            slow = torch.cat((slow, built(slow)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(greedy(built, tokens, 6), slow)


def test_a_layer_that_does_not_say_how_it_is_decoded_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    built = model()
    monkeypatch.setattr(type(built.topology.layers[0].layers[0].layers[1].own_config), "decoding", "refused")
    with pytest.raises(ConfigError, match="a GatedConvLayer does not say how it is decoded"):
        built.new_context(1, 4)


def test_a_layer_that_decodes_other_than_it_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cls = conv_class()
    right = cls.forward

    def forgetful(self: Any, x: Tensor, ctx: Any = None) -> Tensor:
        if ctx is not None:
            ctx.next_cache().append({"x": x[:, None]})
        return right(self, x)

    monkeypatch.setattr(cls, "forward", forgetful)
    built = model()
    for _ in range(2):
        with pytest.raises(ConfigError, match="gives other outputs token by token"):
            built.new_context(1, 4)
    built(torch.zeros(1, 4, dtype=torch.int64))  # whole sequences are as they were


def test_documents_are_not_kept_apart_in_a_layer_that_may_look_across() -> None:
    with pytest.raises(ConfigError, match="a GatedConvLayer may look at other tokens"):
        model()(torch.zeros(1, 4, dtype=torch.int64), documents=torch.zeros(1, 4, dtype=torch.int64))


def test_a_layer_that_looks_ahead_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    built = model()
    check_causal(built)
    monkeypatch.setattr(conv_class(), "forward", lambda self, x, ctx=None: x + x.mean(1, keepdim=True))
    with pytest.raises(ConfigError, match="looks at later tokens"):
        check_causal(built)
    monkeypatch.setattr(conv_class(), "forward", lambda self, x, ctx=None: x[:, :-1])
    with pytest.raises(ConfigError, match=r"returned .*; return a tensor"):
        check_causal(built)
    monkeypatch.setattr(conv_class(), "forward", lambda self, x, ctx=None: x @ x)
    with pytest.raises(ConfigError, match=r"failed: RuntimeError: .*test_custom_layers\.py:"):
        check_causal(built)


class Fails(nn.Module):
    def __init__(self, config: Any) -> None:
        raise KeyError("nothing")


class Wider(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = nn.Linear(config.d_model, config.d_model + 1)

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        return x


class Alone(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("Fails", r"Fails\(config\) failed: KeyError: 'nothing' \(.*test_custom_layers.py:"),
        ("Alone", r"its forward does not take \(x, ctx\)"),
        (
            "Wider",
            r"gate.weight: declared \(16, 16\), the module has \(17, 16\).*gate.bias: declared not at all",
        ),
        ("PLUGIN", "is not a torch.nn.Module class"),
    ],
)
def test_a_module_that_is_not_what_its_schema_says_is_refused(
    monkeypatch: pytest.MonkeyPatch, target: str, message: str
) -> None:
    layer: Any = spec().topology.layers[0].layers[0].layers[1]
    monkeypatch.setattr(type(layer), "target", f"{__name__}:{target}")
    with pytest.raises(ConfigError, match=message):
        build_node(layer)


@pytest.mark.parametrize("kind", ["buffer", "tensor"])
def test_numbers_that_no_state_dict_holds_are_refused_where_ranks_have_parts(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_lost_tensors(model())
    first = conv_class().__init__

    def with_table(self: Any, config: Any) -> None:
        first(self, config)
        if kind == "buffer":
            self.register_buffer("table", torch.ones(3), persistent=False)
        else:
            self.conv.table = torch.ones(3)

    monkeypatch.setattr(conv_class(), "__init__", with_table)
    with pytest.raises(ConfigError, match=r"persistent=False buffer table|plain tensor conv\.table"):
        refuse_lost_tensors(model())


def test_a_model_that_is_filled_from_a_file_has_its_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    first = conv_class().__init__

    def with_table(self: Any, config: Any) -> None:
        first(self, config)
        self.register_buffer("table", nn.init.constant_(torch.empty(64), 2.0), persistent=False)

    monkeypatch.setattr(conv_class(), "__init__", with_table)
    found = [value for name, value in build_empty(spec(), "cpu").named_buffers() if name.endswith("table")]
    assert found
    assert all(bool((value == 2).all()) for value in found)
