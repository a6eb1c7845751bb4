"""Building: names, seeds, initial scales, gradients, meta, and agreement with the schema's own cost."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from model_specs import ATTENTION, SPECS, VOCAB, M, attention, block, spec, transformer
from tests.examples import examples

from caramba.config.estimate import model_cost
from caramba.config.kvcache import EXACT_KINDS
from caramba.config.layer import AttentionLayerConfig
from caramba.config.model import ModelSpec
from caramba.model import build_empty, build_model, init_weights
from caramba.model.topology import attention_applications

TOKENS = torch.randint(VOCAB, (2, 6), generator=torch.Generator().manual_seed(0))


def test_state_dict_names_are_clean() -> None:
    tied = build_model(spec(block("decoupled"), max_positions=8), seed=0)
    names = set(tied.state_dict())
    assert {"embedder.token.weight", "embedder.position.weight", "topology.layers.1.weight"} <= names
    assert "topology.layers.0.layers.0.layers.1.projection.q_sem.weight" in names
    assert not any(name.startswith("head") for name in names)
    untied = build_model(spec(block("standard"), tied=False, bias=True), seed=0)
    assert {"head.weight", "head.bias"} <= set(untied.state_dict())
    pointers = [tensor.data_ptr() for tensor in untied.state_dict().values()]
    assert len(pointers) == len(set(pointers))


def test_tied_head_reads_the_embedding() -> None:
    model = build_model(spec(block("standard")), seed=0)
    hidden = model.hidden(TOKENS)
    torch.testing.assert_close(model(TOKENS), hidden @ model.embedder.token.weight.T)
    assert hidden.shape == (2, 6, M)
    assert model(TOKENS).shape == (2, 6, VOCAB)


def test_a_seed_reproduces_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, second = (
        build_model(transformer("decoupled_gate"), seed=1),
        build_model(transformer("decoupled_gate"), seed=1),
    )
    assert torch.equal(torch.get_rng_state(), state)
    other = build_model(transformer("decoupled_gate"), seed=2)
    for (name, a), b, c in zip(
        first.state_dict().items(), second.state_dict().values(), other.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
        if a.dim() == 2 and not name.endswith(("inv_freq", "gate_dynamic.weight")):
            assert not torch.equal(a, c), name
    torch.manual_seed(5)
    drawn = build_model(transformer("standard"))
    torch.manual_seed(5)
    assert torch.equal(drawn.embedder.token.weight, build_model(transformer("standard")).embedder.token.weight)
    assert not torch.equal(drawn.embedder.token.weight, build_model(transformer("standard")).embedder.token.weight)


def test_initial_scales() -> None:
    wide = {"type": "AttentionLayer", "d_model": 128, "n_heads": 4, "bias": True}
    mlp = {"type": "SwiGLULayer", "d_model": 128, "d_ff": 256, "bias": True}
    norm = {"type": "LayerNormLayer", "d_model": 128}
    model_spec = ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": 300, "d_model": 128},
            "topology": {
                "type": "StackedTopology",
                "layers": [{"type": "CyclicTopology", "layers": [norm, wide, mlp], "n_cycles": 4}, wide],
            },
            "head": {"tied": False},
        }
    )
    model = build_model(model_spec, seed=0)
    depth = 5
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            assert (tensor == 0).all(), name
        elif tensor.dim() == 1:
            assert (tensor == 1).all(), name
        else:
            scaled = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / math.sqrt(2 * depth) if scaled else 0.02
            assert tensor.std().item() == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = build_model(
        spec(
            {"type": "CyclicTopology", "layers": [block(name)], "n_cycles": 2},
            {"type": "RecurrentTopology", "layers": [block("standard")], "steps": 2},
            max_positions=8,
            tied=False,
            bias=True,
        ),
        seed=0,
    )
    model(TOKENS).logsumexp(-1).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0 or parameter_name.endswith("k.bias"), parameter_name


def test_attention_layers_are_distinct_and_in_order() -> None:
    model = build_model(
        spec(
            {"type": "CyclicTopology", "layers": [attention("gqa_scaled")], "n_cycles": 3},
            attention("standard"),
        )
    )
    names = [name for name, _ in model.attention_layers()]
    assert names == ["topology.layers.0.layers.0", "topology.layers.1"]
    assert all(model.get_submodule(name) is layer for name, layer in model.attention_layers())
    assert len(model.new_context(1, 4).caches) == 4


def test_meta_has_shapes_only_and_materialises_with_right_frequencies() -> None:
    model_spec = spec(block("gqa_scaled"), block("decoupled"))
    meta = build_model(model_spec, seed=7, device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters())
    with torch.no_grad():
        assert meta(TOKENS.to("meta")).shape == (2, 6, VOCAB)
        assert meta.new_context(2, 1000, static=True).nbytes() > 0
    real = build_model(model_spec, seed=7)
    loaded = meta.to_empty(device="cpu")
    loaded.load_state_dict(real.state_dict(), strict=True)
    torch.testing.assert_close(loaded(TOKENS), real(TOKENS))
    assigned = build_model(model_spec, device="meta")
    assigned.load_state_dict(real.state_dict(), strict=True, assign=True)
    torch.testing.assert_close(assigned(TOKENS), real(TOKENS))
    torch.manual_seed(7)
    fresh = build_model(model_spec, device="meta").to_empty(device="cpu")
    init_weights(fresh)
    assert fresh.embedder.token.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert torch.isfinite(fresh(TOKENS)).all()


def test_empty_is_where_it_runs_draws_nothing_and_becomes_what_is_read_into_it() -> None:
    model_spec = spec(block("gqa_scaled"), block("decoupled"))
    before = torch.get_rng_state()
    empty = build_empty(model_spec, "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    real = build_model(model_spec, seed=7)
    names = {name: (value.shape, value.dtype, value.device) for name, value in real.state_dict().items()}
    assert {name: (value.shape, value.dtype, value.device) for name, value in empty.state_dict().items()} == names
    empty.load_state_dict(real.state_dict(), strict=True)
    assert torch.equal(empty(TOKENS), real(TOKENS))


def test_casting_the_model_keeps_the_frequencies() -> None:
    model = build_model(transformer("decoupled"), seed=0).to(torch.bfloat16)
    dtypes = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert dtypes
    assert set(dtypes.values()) == {torch.float32}
    assert model(TOKENS).dtype == torch.bfloat16


def test_autocast_forward_and_backward() -> None:
    model = build_model(transformer("decoupled_gate"), seed=0)
    expected = model(TOKENS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(TOKENS)
    logits.float().logsumexp(-1).sum().backward()
    torch.testing.assert_close(logits.float(), expected, rtol=0.05, atol=0.01)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def assert_matches_cost(model_spec: ModelSpec) -> None:
    cost = model_cost(model_spec)
    model = build_model(model_spec, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == cost.params
    assert cost.kv_layers == tuple(layer.dims.streams for _, layer in attention_applications(model))
    for kind in EXACT_KINDS:
        assert model.new_context(1, 1, kind).bytes_per_token == cost.kv_bytes_per_token(kind)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(model_spec=SPECS)
def test_parameters_and_cache_equal_the_cost_analysis(model_spec: ModelSpec) -> None:
    assert_matches_cost(model_spec)


@pytest.mark.parametrize("name", ATTENTION)
def test_parameters_and_cache_equal_the_cost_analysis_per_attention(name: str) -> None:
    assert_matches_cost(transformer(name))


def test_parameter_count_by_hand() -> None:
    model = build_model(transformer("decoupled"), device="meta")
    sem, geo, v, kv, heads = 2, 4, 3, 2, 4
    attention_params = M * (heads * (sem + geo) + kv * (sem + geo + v)) + M * heads * v
    per_block = attention_params + 2 * M + 3 * M * 24
    assert sum(p.numel() for p in model.parameters()) == VOCAB * M + 2 * per_block + M
    assert AttentionLayerConfig(d_model=M, **ATTENTION["decoupled"]).dims().cached == kv * (sem + geo + v)
