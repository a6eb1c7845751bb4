"""Which layers ranks share how, and what they cannot share."""

from __future__ import annotations

import pytest
from tests.unit.model.model_specs import NORM, attention, block, spec, transformer
from torch import nn

from caramba.config.parallel_check import dims_of_rank
from caramba.errors import ConfigError
from caramba.model import Model, build_model
from caramba.model.parallel import tensor_parallel_plan
from caramba.model.parallel.styles import (
    GatedMLPParallel,
    HeadParallel,
    Replicated,
    VocabParallelEmbedding,
    VocabParallelHead,
)


def meta(*layers: dict[str, object], **values: int) -> Model:
    return build_model(spec(*layers, **values), device="meta")


def test_every_layer_with_weights_has_its_style() -> None:
    model = meta({"type": "CyclicTopology", "layers": [block("latent")], "n_cycles": 2}, max_positions=8)
    plan = tensor_parallel_plan(model, 2)
    inner = "topology.layers.0.layers.0.layers"
    assert {name: type(style) for name, style in plan.items()} == {
        "embedder.token": Replicated,
        "embedder.position": Replicated,
        f"{inner}.0.layers.0": Replicated,
        f"{inner}.0.layers.1": HeadParallel,
        f"{inner}.1.layers.0": Replicated,
        f"{inner}.1.layers.1": GatedMLPParallel,
        "topology.layers.1": Replicated,
        "head": Replicated,
    }
    reached = [name for name, _ in model.named_parameters() if not any(name.startswith(f"{key}.") for key in plan)]
    assert reached == []


def test_a_vocabulary_is_split_where_it_divides() -> None:
    model = meta(NORM, vocab_size=24)
    shared = tensor_parallel_plan(model, 3, split_vocabulary=True)
    assert (type(shared["embedder.token"]), type(shared["head"])) == (
        VocabParallelEmbedding,
        VocabParallelHead,
    )
    assert type(tensor_parallel_plan(model, 5, split_vocabulary=True)["head"]) is Replicated


def test_a_rank_caches_its_own_heads_and_what_all_heads_read() -> None:
    own = {name: dims_of_rank(layer_dims(name), 2, name.startswith("latent")) for name in ("decoupled", "latent_first")}
    assert own["decoupled"].streams == (("k_sem", 1, 2), ("k_geo", 1, 4), ("v", 1, 3))
    assert own["latent_first"].streams == (("c", 1, 12), ("k_geo", 1, 4))
    assert own["latent_first"].first_streams == (("k_first", 1, 6), ("v_first", 1, 6))
    assert (own["latent_first"].n_heads, own["latent_first"].n_kv_heads) == (2, 1)


def layer_dims(name: str):
    return meta(attention(name)).attention_layers()[0][1].dims


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("gqa_scaled", 3, r"3 ranks cannot share n_heads=4 heads; use one of 2, 4 \(model.topology"),
        ("gqa_scaled", 4, r"4 ranks cannot share n_kv_heads=2 heads; use one of 2 "),
        ("latent", 16, r"16 ranks cannot share n_heads=4 heads"),
        ("latent_first", 4, r"4 ranks cannot share n_kv_heads=2 heads"),
    ],
)
def test_heads_that_do_not_divide_are_refused(name: str, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tensor_parallel_plan(build_model(transformer(name), device="meta"), ranks)


def test_dropout_of_a_ranks_own_tokens_is_refused() -> None:
    """Ranks draw the same numbers, so that tokens t and t + T/n would get one mask."""
    dropped = meta(NORM, {"type": "DropoutLayer", "p": 0.1})
    with pytest.raises(
        ConfigError, match=r"DropoutLayer with p=0\.1 would drop the same.*p=0, or seq.*topology\.layers\.1\)"
    ):
        tensor_parallel_plan(dropped, 2, split_sequence=True)
    assert type(tensor_parallel_plan(dropped, 2)["topology.layers.1"]) is Replicated, "all have all tokens"
    tensor_parallel_plan(meta(NORM, {"type": "DropoutLayer", "p": 0.0}), 2, split_sequence=True)


def test_features_and_layers_without_a_plan_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"5 ranks cannot share d_ff=24 features; use a multiple of 5.*layers\.0\)"):
        tensor_parallel_plan(meta({"type": "SwiGLULayer", "d_model": 16, "d_ff": 24}), 5)
    model = meta(NORM)
    model.topology.layers[0] = nn.Conv1d(16, 16, 3)
    with pytest.raises(ConfigError, match=r"no plan for a Conv1d; plans exist for attention.*topology\.layers\.0"):
        tensor_parallel_plan(model, 2)
