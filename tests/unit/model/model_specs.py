"""Tiny specs that the model and inference tests build, fixed and drawn at random."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from caramba.config.model import ModelSpec

M, VOCAB = 16, 23
NORM = {"type": "RMSNormLayer", "d_model": M}
MLP = {"type": "SwiGLULayer", "d_model": M, "d_ff": 24}
DECOUPLED = {"n_heads": 4, "n_kv_heads": 2, "mode": "decoupled", "sem_dim": 4, "geo_dim": 8, "v_dim": 6}
LATENT = {"n_heads": 4, "n_kv_heads": 2, "mode": "decoupled", "layout": "latent", "head_dim": 6, "geo_dim": 4}

ATTENTION: dict[str, dict[str, Any]] = {
    "standard": {"n_heads": 4},
    "gqa_scaled": {
        "n_heads": 4,
        "n_kv_heads": 2,
        "mode": "gqa",
        "rope_scaling": {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16},
    },
    "bottleneck": {"n_heads": 4, "mode": "bottleneck", "attn_dim": 8, "bias": True},
    "window": {"n_heads": 2, "local_window": 3, "learned_temperature": True},
    "decoupled": DECOUPLED,
    "decoupled_gate": {**DECOUPLED, "decoupled_gate": True, "decoupled_gate_dynamic": True, "qk_norm": True},
    "decoupled_tie": {
        "n_heads": 2,
        "mode": "decoupled",
        "sem_dim": 8,
        "geo_dim": 4,
        "tie_qk": True,
        "local_window": 4,
        "learned_temperature": True,
    },
    "latent": {**LATENT, "sem_dim": 12},
    "latent_gate": {
        **LATENT,
        "sem_dim": 3,
        "decoupled_gate": True,
        "decoupled_gate_dynamic": True,
        "null_attn": True,
        "local_window": 3,
    },
    "latent_first": {**LATENT, "sem_dim": 12, "exact_first_tokens": 3, "bias": "qkv"},
    "latent_first_narrow": {
        **LATENT,
        "sem_dim": 3,
        "exact_first_tokens": 1,
        "decoupled_gate": True,
        "decoupled_gate_dynamic": True,
        "learned_temperature": True,
        "q_chunk": 2,
    },
    "no_rope": {**DECOUPLED, "rope_enabled": False},
}


def attention(name: str, **values: Any) -> dict[str, Any]:
    return {"type": "AttentionLayer", "d_model": M, **ATTENTION[name], **values}


def block(name: str, **values: Any) -> dict[str, Any]:
    return {
        "type": "SequentialTopology",
        "layers": [
            {"type": "ResidualTopology", "layers": [NORM, attention(name, **values)]},
            {"type": "ResidualTopology", "layers": [NORM, MLP]},
        ],
    }


def spec(
    *layers: dict[str, Any],
    max_positions: int | None = None,
    tied: bool = True,
    bias: bool = False,
    vocab_size: int = VOCAB,
) -> ModelSpec:
    positions = {"type": "token_position", "max_positions": max_positions} if max_positions else {}
    return ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": vocab_size, "d_model": M, **positions},
            "topology": {"type": "StackedTopology", "layers": [*layers, NORM]},
            "head": {"tied": tied, "bias": bias},
        }
    )


def transformer(name: str, repeat: int = 2) -> ModelSpec:
    return spec({"type": "NestedTopology", "layers": [block(name)], "repeat": repeat})


def looped(kind: str, name: str, times: int = 2) -> ModelSpec:
    """One block run several times with the same weights, by a Cyclic or a Recurrent topology."""
    count = {"Cyclic": "n_cycles", "Recurrent": "steps"}[kind]
    return spec({"type": f"{kind}Topology", "layers": [block(name)], count: times})


def biased() -> ModelSpec:
    """A block whose queries, keys and values, gates and ups have biases, which decode steps take side by side."""
    layers = [attention("standard", bias=True), {**MLP, "bias": True}]
    return spec(*({"type": "ResidualTopology", "layers": [NORM, layer]} for layer in layers), vocab_size=VOCAB)


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Nodes that keep the width M, holding one or two nodes that do."""
    lists = st.lists(inner, min_size=1, max_size=2)
    plain = st.sampled_from(["StackedTopology", "SequentialTopology", "ResidualTopology"])

    def counted(type: str, key: str) -> st.SearchStrategy[dict[str, Any]]:
        return st.builds(lambda layers, n: {"type": type, "layers": layers, key: n}, lists, st.integers(1, 2))

    def parallel(layers: list[dict[str, Any]], reduce: str) -> dict[str, Any]:
        d_in = M * len(layers) if reduce == "concat" else M
        linear = {"type": "LinearLayer", "d_in": d_in, "d_out": M, "reduce": reduce}
        return {
            "type": "SequentialTopology",
            "layers": [{"type": "ParallelTopology", "layers": layers}, linear],
        }

    def branching(layers: list[dict[str, Any]]) -> dict[str, Any]:
        linear = {"type": "LinearLayer", "d_in": M * len(layers), "d_out": M}
        return {
            "type": "StackedTopology",
            "layers": [{"type": "BranchingTopology", "layers": layers}, linear],
        }

    return st.one_of(
        st.builds(lambda type, layers: {"type": type, "layers": layers}, plain, lists),
        counted("NestedTopology", "repeat"),
        counted("CyclicTopology", "n_cycles"),
        counted("RecurrentTopology", "steps"),
        st.builds(parallel, lists, st.sampled_from(["mean", "sum", "concat"])),
        st.builds(branching, lists),
    )


LEAVES = st.one_of(
    st.sampled_from(sorted(ATTENTION)).map(attention),
    st.sampled_from([NORM, MLP, {"type": "LayerNormLayer", "d_model": M}, {"type": "DropoutLayer", "p": 0.2}]),
)
SPECS = st.builds(
    lambda layers, max_positions, tied: spec(*layers, max_positions=max_positions, tied=tied),
    st.lists(st.recursive(LEAVES, _containers, max_leaves=4), min_size=1, max_size=2),
    st.sampled_from([None, 16]),
    st.booleans(),
)
