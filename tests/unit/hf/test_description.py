"""config.json read as a manifest node: what it derives, and what it refuses and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.config.estimate.presets import compose_model

from caramba.config.hf import describe_hf, hf_name
from caramba.config.model import ModelSpec
from caramba.data.checkpoint.hf_names import hf_names
from caramba.errors import CheckpointError

LLAMA32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec.model_validate(describe_hf({**LLAMA32_1B, **changes}, "config.json"))


def test_llama32_1b_is_the_preset() -> None:
    preset = compose_model("llama32_1b")
    derived = spec()
    assert derived.embedder == preset.embedder
    assert derived.topology == preset.topology
    assert derived.head == preset.head


def test_windows_split_the_depth() -> None:
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 12}
    layers = spec(**qwen).topology.layers
    assert [getattr(layer, "repeat", None) for layer in layers] == [12, 4, None]
    kinds = ["sliding_attention", "full_attention"] * 8
    alternating = spec(**qwen, layer_types=kinds)
    assert len(alternating.topology.layers) == 17
    assert [name for name in hf_names(alternating).values() if "layers.15.self_attn.q_proj" in name] == [
        "model.layers.15.self_attn.q_proj.weight",
        "model.layers.15.self_attn.q_proj.bias",
    ]
    assert (
        spec(model_type="mistral").topology.layers[0]
        == spec(model_type="mistral", sliding_window=4096).topology.layers[0]
    )
    assert spec(model_type="mistral", sliding_window=None) == spec()
    windowed = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 0}
    assert spec(**windowed) == spec(**windowed, sliding_window=4096)
    assert spec(**windowed) != spec(**windowed, sliding_window=None)


def scaling(**changes: Any) -> dict[str, Any]:
    """What a rope_scaling of config.json becomes, without the fields at their defaults."""
    item = spec(**changes).topology.layers[0].layers[0].layers[1].rope_scaling
    return item.model_dump(exclude_defaults=True)


def test_scalings_of_longer_contexts() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert scaling(rope_scaling=yarn) == yarn
    implied = {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 32768,
        "beta_fast": None,
    }
    assert scaling(rope_parameters=implied) == yarn  # 131072 / 32768
    assert scaling(rope_scaling={"type": "yarn", "factor": 2.0}, max_position_embeddings=4096) == {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
    }
    both = scaling(rope_scaling={**yarn, "mscale": 1.0, "mscale_all_dim": 1.0})
    assert both == {**yarn, "attention_factor": 1.0}
    # transformers takes the length from config.json itself, whatever else the scaling says.
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 7}
    assert scaling(rope_scaling=dynamic, max_position_embeddings=2048) == {
        "type": "dynamic",
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
    }


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, "mixture of experts"),
        ({"model_type": "gemma2"}, "model_type=gemma2 is not an architecture that caramba reads.*llama, mistral"),
        ({"model_type": "phi", "partial_rotary_factor": 0.5}, "model_type=phi"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: AttentionLayer rotates whole heads"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu: SwiGLULayer computes silu"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_type=longrope is not read from config.json; expected default, linear, llama3, dynamic, yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "truncate=false: RopeScalingConfig rounds"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": 1.0}}, "beta_slow=1 must be below beta_fast=1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": None}, "max_position_embeddings: expected an integer"),
        ({"rope_scaling": {"type": "linear"}}, "factor: expected a finite number, got None"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ between kinds of layers"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantised"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no head for the next token"),
        ({"hidden_size": None}, "hidden_size missing"),
        ({"vocab_size": "many"}, "vocab_size: expected an integer from 1 to 2147483647, got 'many'"),
        ({"tie_word_embeddings": "yes"}, "expected true or false"),
        ({"head_dim": None, "num_attention_heads": 30}, "30 does not divide hidden_size=2048"),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "layer_types": ["odd"]}, "layer_types: expected 16"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        spec(**changes)


def test_other_shapes_have_no_names() -> None:
    with pytest.raises(CheckpointError, match="is decoupled attention"):
        hf_names(compose_model("tiny_dba"))
    node = describe_hf(LLAMA32_1B, "x")
    for layer in node["topology"]["layers"][:1]:
        layer["layers"][0]["layers"][1]["learned_temperature"] = True
    with pytest.raises(CheckpointError, match="has temperature, and a Llama layer has no such tensor"):
        hf_names(ModelSpec.model_validate(node))
    node = describe_hf(LLAMA32_1B, "x")
    node["topology"]["layers"][0] |= {"type": "CyclicTopology", "n_cycles": 2}
    del node["topology"]["layers"][0]["repeat"]
    with pytest.raises(CheckpointError, match="is a CyclicTopology"):
        hf_names(ModelSpec.model_validate(node))


def test_names_of_snapshots() -> None:
    assert hf_name(Path("hub/models--meta-llama--Llama-3.2-1B/snapshots/abc")) == "Llama-3.2-1B"


def test_description_names_and_files_load_no_torch() -> None:
    code = (
        "import sys, caramba.config.hf, caramba.data.checkpoint.hf_names, caramba.data.checkpoint.hub, caramba.launch.preflight\n"
        "assert not {'torch', 'huggingface_hub', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
