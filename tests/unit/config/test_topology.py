"""Topologies: how widths flow through them, and what sharing and repeating does to the counts."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caramba.config.cost import Cost, Width, WidthError
from caramba.config.extension import NodeConfig, parse_node
from caramba.config.kvcache import KVCacheKind
from caramba.config.topology import TopologyConfig
from tests.examples import examples

NORM = {"type": "RMSNormLayer", "d_model": 64}
ATTENTION = {"type": "AttentionLayer", "d_model": 64, "n_heads": 4}
MLP = {"type": "SwiGLULayer", "d_model": 64, "d_ff": 96}


def linear(d_in: int, d_out: int, **fields):
    return {"type": "LinearLayer", "d_in": d_in, "d_out": d_out, **fields}


def node(kind: str, *layers, **fields):
    return {"type": f"{kind}Topology", "layers": list(layers), **fields}


def infer(tree) -> Cost:
    config = parse_node(tree)
    assert "Topology" not in tree["type"] or isinstance(config, TopologyConfig)
    return config.infer(Width(64))


class TestCounts:
    def test_nested_repeats_weights_and_caches(self):
        once, cost = infer(ATTENTION), infer(node("Nested", ATTENTION, NORM, repeat=3))
        assert cost.params == 3 * (once.params + 64)
        assert cost.kv == once.kv * 3
        assert cost.repeat == 3
        assert len(cost.children) == 2

    @pytest.mark.parametrize(("kind", "field"), [("Cyclic", "n_cycles"), ("Recurrent", "steps")])
    def test_shared_weights_count_once_and_work_every_time(self, kind, field):
        once, cost = infer(ATTENTION), infer(node(kind, ATTENTION, **{field: 5}))
        assert cost.params == once.params
        assert cost.matmul_params_used == 5 * once.matmul_params_used
        assert cost.attention_width == 5 * once.attention_width
        assert cost.activation_elements == 5 * once.activation_elements
        assert len(cost.kv) == 5

    def test_caches_stand_in_execution_order(self):
        narrow = {**ATTENTION, "head_dim": 8}
        cost = infer(node("Cyclic", node("Residual", ATTENTION), node("Nested", narrow, repeat=2), n_cycles=2))
        assert [streams[0][2] for streams in cost.kv] == [16, 8, 8, 16, 8, 8]

    def test_leaves_tell_runs_from_copies(self):
        cost = infer(node("Nested", node("Cyclic", ATTENTION, n_cycles=4), repeat=3))
        [(leaf, runs, copies)] = cost.leaves()
        assert (leaf.type, runs, copies) == ("AttentionLayer", 12, 3)


class TestWidths:
    def test_parallel_stacks_and_linear_reduces(self):
        cost = infer(node("Stacked", node("Parallel", NORM, MLP, NORM), linear(64, 64, reduce="mean")))
        assert cost.children[0].width_out == Width(64, stack=3)
        assert cost.width_out == Width(64)

    def test_branching_concatenates(self):
        assert infer(node("Branching", NORM, linear(64, 8), MLP)).width_out == Width(136)

    def test_a_single_nested_repeat_may_change_the_width(self):
        assert infer(node("Nested", linear(64, 32), repeat=1)).width_out == Width(32)

    @pytest.mark.parametrize(
        ("tree", "path", "text"),
        [
            (
                node("Stacked", linear(64, 128), NORM),
                "layers[1]",
                "expects width 64, got 128 from layers[0]; set d_model: 128",
            ),
            (
                node("Stacked", NORM, linear(64, 128), node("Residual", node("Sequential", MLP))),
                "layers[2].layers[0].layers[0]",
                "expects width 64, got 128 from layers[1]; set d_model: 128",
            ),
            (
                node("Stacked", NORM, node("Sequential", linear(64, 128), NORM)),
                "layers[1].layers[1]",
                "expects width 64, got 128 from layers[1].layers[0]; set d_model: 128",
            ),
            (
                node("Stacked", node("Parallel", NORM, linear(32, 64))),
                "layers[0].layers[1]",
                "got 64 from the embedder",
            ),
            (node("Residual", linear(64, 32)), "", "expects 64 out, got 32 from layers[0]"),
            (
                node("Stacked", node("Nested", linear(64, 32), repeat=2)),
                "layers[0]",
                "got 32 from layers[0].layers[0]",
            ),
            (node("Cyclic", linear(64, 32), n_cycles=2), "", "keeps its width (each cycle feeds the next)"),
            (node("Recurrent", linear(64, 32), steps=2), "", "keeps its width"),
            (
                node("Parallel", NORM, linear(64, 32)),
                "",
                "expects width 64, as layers[0] gives, got 32 from layers[1]",
            ),
            (
                node("Branching", NORM, node("Parallel", NORM, NORM)),
                "",
                "expects one stream from each branch",
            ),
            (
                node("Stacked", node("Parallel", NORM, NORM), NORM),
                "layers[1]",
                "got a stack of 2 x 64 from layers[0]",
            ),
            (
                node("Stacked", NORM, linear(64, 64, reduce="sum")),
                "layers[1]",
                "got width 64 from layers[0]; remove reduce",
            ),
        ],
    )
    def test_the_first_wrong_node_is_named(self, tree, path, text):
        with pytest.raises(WidthError) as caught:
            infer(tree)
        assert ".".join(caught.value.path) == path
        assert text in str(caught.value)


def keeping(width: int) -> st.SearchStrategy[dict]:
    """Valid nodes that take one stream of `width` and give it back."""
    heads = [count for count in (1, 2, 4) if width % (2 * count) == 0]
    leaves = st.one_of(
        st.just({"type": "RMSNormLayer", "d_model": width}),
        st.builds(lambda bias: {"type": "LayerNormLayer", "d_model": width, "bias": bias}, st.booleans()),
        st.builds(
            lambda f, bias: {"type": "SwiGLULayer", "d_model": width, "d_ff": f, "bias": bias},
            st.integers(1, 40),
            st.booleans(),
        ),
        st.builds(
            lambda n, window, norm: {
                "type": "AttentionLayer",
                "d_model": width,
                "n_heads": n,
                "head_dim": 4,
                "local_window": window,
                "qk_norm": norm,
            },
            st.sampled_from(heads),
            st.none() | st.integers(1, 50),
            st.booleans(),
        ),
        st.builds(
            lambda layout, gate: {
                "type": "AttentionLayer",
                "d_model": width,
                "n_heads": heads[-1],
                "mode": "decoupled",
                "layout": layout,
                "sem_dim": 8,
                "geo_dim": 8,
                "decoupled_gate": gate,
            },
            st.sampled_from(["per_head", "latent"]),
            st.booleans(),
        ),
        st.just({"type": "DropoutLayer", "p": 0.1}),
    )

    def wrap(children: st.SearchStrategy[dict]) -> st.SearchStrategy[dict]:
        several = st.lists(children, min_size=1, max_size=3)
        times = st.integers(1, 3)
        return st.one_of(
            st.builds(lambda items: node("Sequential", *items), several),
            st.builds(lambda items: node("Residual", *items), several),
            st.builds(lambda items, n: node("Nested", *items, repeat=n), several, times),
            st.builds(lambda items, n: node("Cyclic", *items, n_cycles=n), several, times),
            st.builds(lambda items, n: node("Recurrent", *items, steps=n), several, times),
            st.builds(
                lambda items: node("Sequential", node("Branching", *items), linear(width * len(items), width)),
                several,
            ),
            st.builds(
                lambda items, how: node(
                    "Sequential",
                    node("Parallel", *items),
                    linear(width * (len(items) if how == "concat" else 1), width, reduce=how),
                ),
                several,
                st.sampled_from(["mean", "sum", "concat"]),
            ),
        )

    return st.recursive(leaves, wrap, max_leaves=8)


def by_hand(config: NodeConfig) -> int:
    """Count parameters by walking the schema, apart from the cost tree."""
    if isinstance(config, TopologyConfig):
        return sum(by_hand(layer) for layer in config.layers) * getattr(config, "repeat", 1)
    return sum(math.prod(shape) for shape in config.parameter_shapes().values())


@settings(max_examples=examples(60), deadline=None)
@given(st.sampled_from([8, 16]).flatmap(lambda width: st.tuples(st.just(width), keeping(width))))
def test_any_valid_tree_infers_and_adds_up(case):
    width, tree = case
    config = parse_node(node("Stacked", tree))
    cost = config.infer(Width(width))
    assert cost.width_out == Width(width)
    assert cost.params == by_hand(config) == sum(leaf.params * copies for leaf, _, copies in cost.leaves())
    assert cost.matmul_params_used == sum(leaf.matmul_params_used * runs for leaf, runs, _ in cost.leaves())
    assert len(cost.kv) == len(cost.attention) == sum(runs for leaf, runs, _ in cost.leaves() if leaf.attention)
    assert cost.flops_per_token(17) == pytest.approx(
        sum(leaf.flops_per_token(17) * runs for leaf, runs, _ in cost.leaves())
    )
    assert cost.kv_bytes_per_token(KVCacheKind.FP16) == 2 * cost.kv_elements_per_token
    assert sum(cost.kv_bytes_per_layer(KVCacheKind.NF4)) == cost.kv_bytes_per_token(KVCacheKind.NF4)
