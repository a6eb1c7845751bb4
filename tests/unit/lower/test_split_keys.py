"""Layers of the latent layout whose keys stay in two parts: the same numbers as with joined keys, and who takes them.

On the CPU the op's reference stands for its kernels.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.cache import Context, LatentLayerKVCache
from caramba.config.attention import uses_split_keys
from caramba.config.cost import Width
from caramba.config.layer import AttentionLayerConfig
from caramba.layer import AttentionLayer, Documents
from caramba.layer.score import VarlenKernel
from caramba.lower import split_keys
from caramba.lower.document_separation import documents_path
from caramba.lower.lowering import lower
from caramba.lower.split_keys import SplitKeys, uses_split_keys_kernel
from caramba.ops import backend
from caramba.ops.decoupled_attention import decoupled_attention, reference_decoupled_attention
from caramba.runtime import AttentionChoice

PLACE = ("decoupled_attention", "cpu")
CPU, T = torch.device("cpu"), 9
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 3, 3, 4]])
SHAPES = {"expanded": {"sem_dim": 10, "geo_dim": 4}, "absorbed": {"sem_dim": 3, "geo_dim": 8}}


def build(shape: str = "expanded", **fields: Any) -> AttentionLayer:
    """A layer that takes the op where a fixture attached it."""
    layer = build_plain(shape, **fields)
    lower(layer, "cpu", "prefill")
    return layer


def build_plain(shape: str = "expanded", **fields: Any) -> AttentionLayer:
    torch.manual_seed(0)
    dims = {"d_model": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 6, **SHAPES[shape]}
    layer = AttentionLayer(
        AttentionLayerConfig.model_validate({"mode": "decoupled", "layout": "latent", **dims, **fields})
    )
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def drawn(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """A forward is compiled a limited number of times in a process, and other files compile it too."""
    yield
    torch.compiler.reset()


def take_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers on the CPU take the op, of any width and dtype."""
    monkeypatch.setitem(backend._attached, PLACE, "reference")
    monkeypatch.setattr(split_keys, "WIDEST", 9)
    for module in (split_keys, sys.modules[reference_decoupled_attention.__module__]):
        monkeypatch.setattr(module, "has_two_part_keys", lambda *_: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """Layers on the CPU take the op and say of what shapes."""
    seen: list[list[tuple[int, ...]]] = []

    def spy(*tensors: Any) -> Tensor:
        seen.append([tuple(x.shape) for x in tensors if x is not None])
        return decoupled_attention(*tensors)

    take_all(monkeypatch)
    monkeypatch.setattr(split_keys, "decoupled_attention", spy)
    return seen


def gradients(layer: Any, x: Tensor, documents: Documents | None = None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = layer(x, documents)
    wanted = [x, *layer.parameters()]
    return [out, *torch.autograd.grad(out, wanted, drawn(*out.shape, seed=5).to(out.dtype))]


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"local_window": T, "q_chunk": 2},
        {"decoupled_gate": True, "decoupled_gate_dynamic": True, "learned_temperature": True},
        {"rope_enabled": False, "dropout": 0.5},
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_with_the_op_is_the_layer(
    calls: list[object], shape: str, fields: dict[str, Any], has_documents: bool
) -> None:
    layer, x = build(shape, **fields).double().eval(), drawn(2, T, 16)
    documents = Documents.of(IDS) if has_documents else None
    ours = gradients(layer, x, documents)
    keys = [(2, T, 4, 6), (2, T, 1, 4), (2, T, 4, 6)] if shape == "expanded" else [(2, T, 1, 3), (2, T, 1, 8)]
    keys += keys[:1] if shape == "absorbed" else []
    rows = [(2, T)] if has_documents else []
    assert calls == [[(2, T, 4, keys[0][-1] + keys[1][-1]), *keys, *rows]]
    with backend.without_kernels("decoupled_attention"):
        for one, other in zip(ours, gradients(layer, x, documents), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert len(calls) == 1


class Float64Cache(LatentLayerKVCache):
    """A cache that keeps what it is given, as heads first and in memory of tokens first, so that a prefill is exact."""

    def append(self, streams: Any) -> dict[str, Tensor]:
        kept = {}
        for name, x in streams.items():
            before = getattr(self, "kept", {}).get(name, x[:, :, :0])
            kept[name] = torch.cat((before, x), 2).transpose(1, 2).contiguous().transpose(1, 2)
        super().append(streams)
        self.kept = kept
        return self.kept


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sizes", [[4, 5], [7, 1, 1], [1, 2, 6], [T]])
def test_prompts_in_chunks(calls: list[object], shape: str, sizes: list[int]) -> None:
    layer, x = build(shape).double(), drawn(2, T, 16)
    with backend.without_kernels("decoupled_attention"):
        want = layer(x)
    ctx, outs = Context([Float64Cache(layer.dims.streams, batch_size=2, max_tokens=T)]), []
    with torch.no_grad():
        for part in x.split(sizes, dim=1):
            ctx.begin()
            outs.append(layer(part, ctx))
            ctx.commit(part.shape[1])
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=0, atol=1e-11)
    assert len(calls) == sum(size > 1 for size in sizes), "one query alone keeps to the score op"


def test_narrow_keys_take_the_op_behind_a_prefix_alone(calls: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_keys, "WIDEST", 256)
    layer, x = build().double(), drawn(2, T, 16)
    want = layer(x)
    ctx, outs = Context([Float64Cache(layer.dims.streams, batch_size=2, max_tokens=T)]), []
    with torch.no_grad():
        for part, n_calls in zip(x.split([4, 3, 2], dim=1), (0, 1, 2), strict=True):
            ctx.begin()
            outs.append(layer(part, ctx))
            ctx.commit(part.shape[1])
            assert len(calls) == n_calls
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=0, atol=1e-11)


def test_a_cache_of_another_dtype(calls: list[object]) -> None:
    layer, x = build("absorbed"), drawn(2, T, 16).float()
    ctx = Context([LatentLayerKVCache(layer.dims.streams, batch_size=2, max_tokens=T)])
    with torch.no_grad():
        want, outs = layer(x), []
        for part in x.split([4, 5], dim=1):
            ctx.begin()
            outs.append(layer(part, ctx))
            ctx.commit(part.shape[1])
    assert outs[0].dtype == torch.float32
    assert (torch.cat(outs, 1) - want).norm() < 0.02 * want.norm()
    assert len(calls) == 3


@pytest.mark.parametrize(
    "fields", [{"null_attn": True}, {"exact_first_tokens": 2}, {"local_window": 4}, {"dropout": 0.5}]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_the_op_does_not_do_keeps_to_the_score_op(calls: list[object], shape: str, fields: dict[str, Any]) -> None:
    build(shape, **fields).double().train()(drawn(2, T, 16))
    assert not calls
    build(shape).double().train()(drawn(2, T, 16))
    assert len(calls) == 1


def test_narrow_keys_and_watched_scores_keep_to_the_score_op(
    calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, seen = build_plain().double(), []
    handle = layer.score.register_forward_hook(lambda *_: seen.append(None))
    with lower(layer, "cpu", "train"):
        layer(drawn(2, T, 16))
        assert (len(seen), len(calls)) == (1, 0)
    handle.remove()
    lower(layer, "cpu", "train")
    monkeypatch.setattr(split_keys, "WIDEST", 10)
    layer(drawn(2, T, 16))
    assert not calls
    monkeypatch.setattr(split_keys, "WIDEST", 9)
    layer(drawn(2, T, 16))
    assert len(calls) == 1


def test_before_a_kernel_for_documents_that_refuses_the_width(calls: list[object]) -> None:
    from caramba.layer.score import varlen_attention

    def refuses(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
    ) -> Tensor:
        raise AssertionError

    layer, x = build().double(), drawn(2, T, 16)
    with varlen_attention(VarlenKernel.of(refuses, device="cpu", dtypes=(torch.float64,))):
        documents = Documents.of(IDS)
        assert documents.starts is not None
        out = layer(x, documents)
    assert len(calls) == 1
    torch.testing.assert_close(out, layer(x, Documents.of(IDS)))


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_compiled_layer_in_half_precision_calls_the_op(
    monkeypatch: pytest.MonkeyPatch, shape: str, has_documents: bool
) -> None:
    layer, x = build(shape), drawn(2, T, 16).float()
    documents = Documents.of(IDS) if has_documents else None
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = gradients(layer, x, documents)
        take_all(monkeypatch)
        lower(layer, "cpu", "train")
        eager = gradients(layer, x, documents)
        again = gradients(torch.compile(layer, backend=keep, fullgraph=True), x, documents)
    nodes = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("decoupled_attention" in target for target in nodes) == 1
    for want, one, other in zip(plain, eager, again, strict=True):
        assert one.dtype == other.dtype == want.dtype
        assert (one - want).norm() < 0.03 * want.norm()
        assert (other - want).norm() < 0.03 * want.norm()


def test_a_compiled_training_step_runs_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = build().bfloat16(), drawn(2, T, 16).bfloat16()
    plain = gradients(layer, x)
    take_all(monkeypatch)
    lower(layer, "cpu", "train")
    for want, ours in zip(plain, gradients(torch.compile(layer, backend="aot_eager", fullgraph=True), x), strict=True):
        assert (ours - want).norm() < 0.05 * want.norm()


def wide(**fields: Any) -> AttentionLayerConfig:
    """A layer of `llama32_dba`'s widths: 64 + 256 when expanded."""
    dims = {"d_model": 128, "n_heads": 2, "head_dim": 64, "sem_dim": 128, "geo_dim": 256}
    return AttentionLayerConfig.model_validate({"mode": "decoupled", "layout": "latent", **dims, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sem_dim": 32},  # absorbed
        {"rope_enabled": False},
        {"sem_dim": 32, "rope_enabled": False},
        {"learned_temperature": True},
    ],
)
def test_what_autograd_keeps_of_two_parts_is_what_the_plan_says(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Trap: keys counted as joined for every head, and values and output as wide, where the op keeps what it reads."""
    monkeypatch.setitem(backend._attached, PLACE, "triton")
    config, half = wide(**fields), torch.bfloat16
    layer, cost = AttentionLayer(config).to(half), config.infer(Width(128))
    lower(layer, "cpu", "train")
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    batch, n_tokens = 1024, 4  # copies of weights and the rotary table are shared by the batch

    def kept() -> float:
        found: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):
            layer(torch.randn(batch, n_tokens, 128, dtype=half, requires_grad=True))
        sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() // x.element_size() for x in found}
        return sum(size for at, size in sizes.items() if at not in own) / (batch * n_tokens)

    in_parts = kept()
    with backend.without_kernels("decoupled_attention"):
        joined = kept()
    assert in_parts == pytest.approx(cost.with_split_keys().activation_elements, rel=0.02)
    assert joined == pytest.approx(cost.activation_elements, rel=0.02)
    assert joined - in_parts == cost.spared_elements > 0


def test_the_plan_knows_which_layers_keep_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend._attached, PLACE, "triton")
    sizes = itertools.product((8, 16, 32, 48, 64, 128), (16, 32, 96, 64, 128, 256), (64, 128, 192, 256, 512))
    configs = [wide(head_dim=head, sem_dim=sem, geo_dim=geo) for head, sem, geo in sizes]
    refused = ({"null_attn": True}, {"exact_first_tokens": 2}, {"dropout": 0.1}, {"local_window": 64})
    configs += [wide(**fields) for fields in refused]
    configs.append(AttentionLayerConfig(d_model=640, n_heads=2))
    found = [uses_split_keys(config) for config in configs]
    assert found == [uses_split_keys_kernel(config, CPU, torch.bfloat16) for config in configs]
    assert 0 < sum(found) < len(found)


def test_what_keeps_documents_apart_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, half = AttentionChoice(None, False, "measured"), torch.bfloat16
    assert not uses_split_keys_kernel(wide(), CPU, half), "no kernel is attached"
    assert documents_path(CPU, half, [wide()], choice)[0] == "mask"
    monkeypatch.setitem(backend._attached, PLACE, "triton")
    for compiled in (False, True):
        assert documents_path(CPU, half, [wide()] * 2, choice, is_compiled=compiled) == (
            "decoupled_attention",
            "decoupled_attention takes the first key of every query",
        )
    assert documents_path(CPU, half, [wide(), wide(geo_dim=64)], choice) == (
        "decoupled_attention, mask",
        "1 of 2 attention layers: decoupled_attention takes the first key of every query; the others: variable-length "
        "attention is for CUDA, not for cpu",
    )
    absorbed = wide(sem_dim=32)
    assert uses_split_keys_kernel(absorbed, CPU, half)
    refused = [
        wide(null_attn=True),
        wide(exact_first_tokens=2),
        wide(dropout=0.1),
        wide(local_window=64),
        wide(geo_dim=192),
        wide(geo_dim=320),
        AttentionLayerConfig(d_model=640, n_heads=2),
    ]
    assert not any(uses_split_keys_kernel(config, CPU, half) for config in refused)
    assert not uses_split_keys_kernel(wide(), CPU, torch.float32)
    for config in (wide(), absorbed):  # what is said of a config is what its layer does
        layer = AttentionLayer(config).bfloat16()
        seen: list[object] = []
        monkeypatch.setattr(
            split_keys, "decoupled_attention", lambda *x, s=seen: s.append(x) or decoupled_attention(*x)
        )
        lower(layer, "cpu", "train")
        assert isinstance(layer.projection, SplitKeys)
        layer(torch.randn(1, 5, 128, dtype=half), Documents.of(torch.zeros(1, 5, dtype=torch.int64)))
        assert len(seen) == 1
