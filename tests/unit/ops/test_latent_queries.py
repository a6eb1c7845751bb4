"""The op of latent queries: its contract, its formula, and the layer that calls it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer, Documents
from caramba.lower import absorb_latent as latent
from caramba.lower.lowering import lower
from caramba.ops import backend
from caramba.ops.latent_queries import latent_queries

OPS = torch.ops.caramba
B, T, H, D, G = 2, 3, 2, 4, 6


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments(*, per_row: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    angles = drawn(*((B, 1) if per_row else (1,)), T, G // 2, seed=2)
    q, geo_map = drawn(B, T, H, D).requires_grad_(), drawn(H, D, G, seed=1).requires_grad_()
    return q, geo_map, angles.cos(), angles.sin(), 0.5


def test_contract_and_gradients() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(OPS.latent_queries.default, arguments(), test_utils=tests)
    q, geo_map, *rest = arguments(per_row=True)
    grad = drawn(B, H, T, D + G, seed=3).transpose(1, 2)  # of any strides
    torch.library.opcheck(
        OPS.latent_queries_backward.default,
        (grad, q.detach(), geo_map.detach(), *rest),
        test_utils=tests[::2],
    )
    assert torch.autograd.gradcheck(lambda q, m: latent_queries(q, m, *rest), (q, geo_map))


@pytest.mark.parametrize("per_row", [False, True])
def test_formula(per_row: bool) -> None:
    q, geo_map, cos, sin, scale = arguments(per_row=per_row)
    y = latent_queries(q, geo_map, cos, sin, scale)
    assert torch.equal(y[..., :D], q * scale)
    for b, t, h in torch.cartesian_prod(torch.arange(B), torch.arange(T), torch.arange(H)).tolist():
        first, second = (q[b, t, h] @ geo_map[h]).chunk(2)
        c, s = (table[b, 0, t] if per_row else table[0, t] for table in (cos, sin))
        want = torch.complex(first, second) * torch.complex(c, s) * scale
        torch.testing.assert_close(y[b, t, h, D:], torch.cat((want.real, want.imag)))


def test_what_does_not_fit_is_refused() -> None:
    q, geo_map, cos, sin, scale = arguments()
    with pytest.raises(ConfigError, match=r"q is torch.int64 of shape .*expected floating \[B, T, H, D\]"):
        latent_queries(q.long(), geo_map, cos, sin, scale)
    with pytest.raises(
        ConfigError,
        match=r"geo_map is torch.float64 of shape \(2, 4, 5\), expected floating \[2, 4, G\] with even G",
    ):
        latent_queries(q, geo_map[..., 1:], cos, sin, scale)
    with pytest.raises(
        ConfigError,
        match=r"cos is torch.float64 \(1, 2, 3\) .*expected both floating \(1, 3, 3\) or \(2, 1, 3, 3\)",
    ):
        latent_queries(q, geo_map, cos[:, 1:], sin, scale)
    with pytest.raises(ConfigError, match="cos and sin require gradients"):
        latent_queries(q, geo_map, cos.requires_grad_(), sin, scale)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Layers on the CPU take the op, in any dtype, and say so."""
    seen: list[torch.Size] = []

    def spy(q: Tensor, *rest: object) -> Tensor:
        seen.append(q.shape)
        return latent_queries(q, *rest)  # pyright: ignore[reportArgumentType]

    monkeypatch.setitem(backend._attached, ("latent_queries", "cpu"), "reference")
    monkeypatch.setattr(latent, "has_narrow_queries", lambda *_: True)
    monkeypatch.setattr(latent, "latent_queries", spy)
    return seen


def build(**fields: object) -> AttentionLayer:
    torch.manual_seed(0)
    dims = {"d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, "sem_dim": 10, "geo_dim": 4}
    layer = AttentionLayer(
        AttentionLayerConfig.model_validate({"mode": "decoupled", "layout": "latent", **dims, **fields})
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    lower(layer, "cpu", "train")
    return layer


def gradients(layer: AttentionLayer, x: Tensor, documents: Documents | None) -> list[Tensor]:
    out = layer(x, documents)
    named = dict(layer.named_parameters())
    found = torch.autograd.grad(out, named.values(), drawn(*out.shape, seed=5).to(out.dtype))
    return [out, *found]


@pytest.mark.parametrize("has_documents", [False, True])
def test_a_layer_with_the_op_is_the_layer(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch, has_documents: bool
) -> None:
    layer, x = build().double(), drawn(2, 9, 16, seed=4)
    documents = Documents.of(torch.arange(9).div(4, rounding_mode="floor").expand(2, -1)) if has_documents else None
    fused = gradients(layer, x, documents)
    assert calls == [(2, 9, 4, 6)]
    monkeypatch.delitem(backend._attached, ("latent_queries", "cpu"))
    for ours, want in zip(fused, gradients(layer, x, documents), strict=True):
        torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-12)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"decoupled_gate": True},
        {"learned_temperature": True},
        {"exact_first_tokens": 2},
        {"rope_enabled": False},
    ],
)
def test_what_weighs_the_paths_keeps_to_plain_code(calls: list[torch.Size], fields: dict[str, object]) -> None:
    build(**fields).double()(drawn(2, 9, 16))
    with torch.no_grad():
        build().double()(drawn(2, 9, 16))
    assert not calls


def test_a_compiled_layer_in_half_precision_calls_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend._attached, ("latent_queries", "cpu"), "reference")
    layer, x = build(), drawn(2, 9, 16, seed=4).bfloat16()
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = gradients(layer, x, None)
        compiled = torch.compile(layer, backend=keep, fullgraph=True)
        again = gradients(compiled, x, None)  # pyright: ignore[reportArgumentType]
    assert sum("latent_queries" in str(node.target) for graph in graphs for node in graph.graph.nodes) == 1
    for ours, want in zip(again, plain, strict=True):
        assert (ours - want).norm() < 0.02 * want.norm()
