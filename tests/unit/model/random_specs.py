"""Random valid networks: containers nested exactly as deep as asked, attention with any options that go together."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from model_specs import MLP, NORM, M, spec

from caramba.config.model import ModelSpec

Node = dict[str, Any]
HEADS = [(4, 4), (4, 2), (4, 1), (2, 2), (1, 1)]
# `dynamic` reads its caches up to the original length, so that is above every test's; the others bend below it.
SCALINGS = [
    None,
    {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
    {"type": "linear", "factor": 2.0},
    {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
]


@st.composite
def attentions(draw: st.DrawFn) -> Node:
    """One attention layer of width M with every option free, within the rules of its schema."""
    flag = st.booleans()
    mode = draw(st.sampled_from(["standard", "gqa", "decoupled", "bottleneck"]))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    node: Node = {"type": "AttentionLayer", "d_model": M, "n_heads": heads, "mode": mode}
    if mode == "standard":
        kv_heads = heads
    else:
        node["n_kv_heads"] = kv_heads
    node |= {name: draw(flag) for name in ("null_attn", "learned_temperature", "bias", "qk_norm")}
    node |= {
        "local_window": draw(st.sampled_from([None, 1, 3, 20])),
        "q_chunk": draw(st.sampled_from([None, 1, 2, 5])),
        "dropout": draw(st.sampled_from([0.0, 0.3])),
        "rope_enabled": draw(flag),
    }
    if node["rope_enabled"]:
        node |= {"rope_base": 100.0, "rope_scaling": draw(st.sampled_from(SCALINGS))}
    if mode == "bottleneck":
        node["attn_dim"] = heads * draw(st.sampled_from([2, 4]))
    elif mode == "decoupled" and draw(flag):
        # One latent for all heads: neither values nor norms of their own.
        node |= {
            "layout": "latent",
            "sem_dim": draw(st.sampled_from([3, 12])),
            "geo_dim": draw(st.sampled_from([2, 8])),
            "head_dim": draw(st.sampled_from([None, 6])),
            "qk_norm": False,
            "decoupled_gate": draw(flag),
        }
        node["decoupled_gate_dynamic"] = node["decoupled_gate"] and draw(flag)
        if draw(flag):
            node |= {"exact_first_tokens": draw(st.sampled_from([1, 2, 5, 40]))}
            node |= {"null_attn": False, "local_window": None, "dropout": 0.0}
    elif mode == "decoupled":
        node |= {
            "sem_dim": kv_heads * draw(st.sampled_from([2, 4])),
            "geo_dim": kv_heads * draw(st.sampled_from([2, 6])),
            "v_dim": draw(st.sampled_from([None, kv_heads * 3, kv_heads * 9])),
            "rope_semantic": node["rope_enabled"] and draw(flag),
            "tie_qk": heads == kv_heads and draw(flag),
            "decoupled_gate": draw(flag),
        }
        node["decoupled_gate_dynamic"] = node["decoupled_gate"] and draw(flag)
    else:
        node["head_dim"] = draw(st.sampled_from([None, 6]))
    return node


def linear(d_in: int, reduce: str | None = None) -> Node:
    return {"type": "LinearLayer", "d_in": d_in, "d_out": M, "reduce": reduce}


@st.composite
def nodes(draw: st.DrawFn, depth: int) -> Node:
    """A node that keeps the width M: a layer at depth 0, else a container whose first child is `depth - 1` deep."""
    if depth == 0:
        plain = [NORM, MLP, {"type": "LayerNormLayer", "d_model": M}, {"type": "DropoutLayer", "p": 0.3}]
        return draw(st.one_of(attentions(), attentions(), st.sampled_from(plain)))
    layers = [draw(nodes(depth - 1))]
    if draw(st.booleans()):
        layers.append(draw(nodes(draw(st.integers(0, depth - 1)))))
    kinds = "Stacked Sequential Residual Nested Cyclic Recurrent Parallel Branching"
    kind = draw(st.sampled_from(kinds.split()))
    node: Node = {"type": f"{kind}Topology", "layers": layers}
    if kind == "Parallel":
        reduce = draw(st.sampled_from(["mean", "sum", "concat"]))
        after = linear(M * len(layers) if reduce == "concat" else M, reduce)
        return {"type": "SequentialTopology", "layers": [node, after]}
    if kind == "Branching":
        return {"type": "SequentialTopology", "layers": [node, linear(M * len(layers))]}
    count = {"Nested": "repeat", "Cyclic": "n_cycles", "Recurrent": "steps"}.get(kind)
    return node | ({count: draw(st.integers(1, 2))} if count else {})


@st.composite
def deep_specs(draw: st.DrawFn, max_positions: int = 16) -> ModelSpec:
    """A model whose tree is three containers deep below its root."""
    tree = draw(nodes(3))
    positions = draw(st.sampled_from([None, max_positions]))
    return spec(tree, max_positions=positions, tied=draw(st.booleans()))
