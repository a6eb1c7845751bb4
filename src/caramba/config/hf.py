"""config.json of a Hugging Face model folder, read as the manifest's description of the same network. No torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from caramba.config.model import ModelSpec
from caramba.config.source import is_mapping, is_sequence, list_of, mapping_of, read_object
from caramba.errors import CheckpointError, nearest, quote

CONFIG = "config.json"
REMOTE_TYPE = "caramba"
DERIVED = ("embedder", "topology", "head")

# What transformers assumes for a key that a family's config.json leaves out.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "max_window_layers": 28, "sliding_window": 4096, "head_dim": 128},
}
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
SILU = ("silu", "swish")
MAX_CONFIG_BYTES = 4 << 20
MAX_SIZE, MAX_LAYERS, MAX_NUMBER = 2**31 - 1, 4096, 1e30
ROPE_TYPES = ("default", "linear", "llama3", "dynamic", "yarn")


def is_hf_folder(path: Path) -> bool:
    """Whether `path` is a folder with a config.json that names a model type, as transformers writes it."""
    if not os.path.isfile(path / CONFIG):  # False for a name that is too long, where Path raises
        return False
    try:
        return "model_type" in read_object(path / CONFIG, CheckpointError, "", max_bytes=MAX_CONFIG_BYTES)
    except CheckpointError:
        return True  # damaged, which `read_hf_config` reports


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read a folder's config.json.

    Raises:
        CheckpointError: it is missing or is not a JSON object.
    """
    file = folder / CONFIG
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give a Hugging Face model folder")
    if not file.is_file():
        raise CheckpointError(f"{folder}: has no {CONFIG}; give the folder with it and the .safetensors files")
    return read_object(file, CheckpointError, "download it again", max_bytes=MAX_CONFIG_BYTES)


def spec_of_folder(folder: Path) -> ModelSpec:
    """Return the validated description of the network of a Hugging Face folder, named after the folder.

    Raises:
        CheckpointError: as for `read_hf_config` and `describe_hf`.
    """
    config = read_hf_config(folder)
    if is_remote(config):
        return _exported_spec(config, str(folder / CONFIG))
    try:
        return ModelSpec.model_validate({"name": hf_name(folder), **describe_hf(config, str(folder / CONFIG))})
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{folder / CONFIG}: describes no valid network: {str(error)[:500]}; download it again"
        ) from None


def is_remote(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an export with modelling code of its own."""
    return config.get("model_type") == REMOTE_TYPE


def _exported_spec(config: Mapping[str, Any], where: str) -> ModelSpec:
    spec = mapping_of(config.get("caramba")).get("spec")
    if spec is None:
        raise CheckpointError(f"{where}: does not say which network it is; export it again")
    try:
        return ModelSpec.model_validate(spec)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{where}: describes no valid network: {str(error)[:500]}; export it again") from None


def hf_name(folder: Path) -> str:
    """Return a model's name: that of its folder, or of its repository for a snapshot in the hub's cache."""
    is_snapshot = folder.parent.name == "snapshots"
    return folder.parents[1].name.rpartition("--")[2] if is_snapshot else folder.resolve().name


def describe_hf(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Translate a config.json to the manifest's `embedder`, `topology` and `head`.

    Layers of equal attention become one NestedTopology, so a model whose window holds for some layers has several.

    Args:
        config: the content of config.json, of transformers 4 or 5.
        where: what the errors call it.

    Raises:
        CheckpointError: an architecture or option that caramba's layers do not compute, with the reason.
    """
    given = {key: value for key, value in config.items() if value is not None}
    values = FAMILIES.get(str(given.get("model_type")), {}) | given
    if "sliding_window" in config and config["sliding_window"] is None:
        values.pop("sliding_window", None)
    reader = _Reader(values, where)
    reader.refuse_unsupported()
    width, eps = reader.integer("hidden_size"), reader.number("rms_norm_eps", 1e-6)
    norm = {"type": "RMSNormLayer", "d_model": width, "eps": eps}
    feed_forward = {
        "type": "SwiGLULayer",
        "d_model": width,
        "d_ff": reader.integer("intermediate_size"),
        "bias": reader.flag("mlp_bias"),
    }
    attention = reader.attention(eps)
    layers: list[dict[str, Any]] = []
    for window, run in groupby(reader.windows()):
        own = {**attention, "local_window": window}
        block = [{"type": "ResidualTopology", "layers": [norm, item]} for item in (own, feed_forward)]
        layers.append({"type": "NestedTopology", "repeat": len(list(run)), "layers": block})
    return {
        "embedder": {"vocab_size": reader.integer("vocab_size"), "d_model": width},
        "topology": {"type": "StackedTopology", "layers": [*layers, norm]},
        "head": {"tied": reader.flag("tie_word_embeddings")},
    }


class _Reader:
    """A family's config.json with its defaults filled in."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self.where = where
        self.family = str(values.get("model_type"))[:100]

    def refuse_unsupported(self) -> None:
        values = self.values
        if any(isinstance(values.get(key), int) and values[key] > 1 for key in EXPERTS):
            raise self.error(f"model_type={self.family} is a mixture of experts, and caramba has no expert layer")
        if self.family not in FAMILIES:
            raise self.error(
                f"model_type={self.family} is not an architecture that caramba reads"
                f"{nearest(self.family, FAMILIES)}; it reads {', '.join(FAMILIES)} "
                "(Llama 2 to 3.2, TinyLlama, SmolLM, Mistral, dense Qwen 2 and 3)"
            )
        names = [str(name)[:100] for name in list_of(values.get("architectures"))[:10]]
        if names and not any(name.endswith("ForCausalLM") for name in names):
            raise self.error(f"architectures={names} has no head for the next token; expected …ForCausalLM")
        if values.get("quantization_config"):
            raise self.error("quantization_config: the weights are quantised; use the bf16 or fp16 release")
        if str(values.get("hidden_act", "silu")) not in SILU:
            raise self.error(f"hidden_act={str(values['hidden_act'])[:100]}: SwiGLULayer computes silu")
        missing = [key for key in NEEDED if key not in values]
        if missing:
            raise self.error(f"{', '.join(missing)} missing; download {CONFIG} again")

    def attention(self, eps: float) -> dict[str, Any]:
        width, heads = self.integer("hidden_size"), self.integer("num_attention_heads")
        kv_heads = self.integer("num_key_value_heads", heads)
        if "head_dim" not in self.values and width % heads:
            raise self.error(f"num_attention_heads={heads} does not divide hidden_size={width}, without head_dim")
        theta, scaling = self.rope()
        bias: bool | str = "qkv" if self.family == "qwen2" else False
        if self.family in ("llama", "qwen3"):
            bias = self.flag("attention_bias")
        return {
            "type": "AttentionLayer",
            "mode": "standard" if kv_heads == heads else "gqa",
            "d_model": width,
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "head_dim": self.integer("head_dim", width // heads),
            "rope_base": theta,
            "rope_scaling": scaling,
            "bias": bias,
            "qk_norm": self.family == "qwen3",
            "qk_norm_eps": eps if self.family == "qwen3" else 1e-6,
            "dropout": self.number("attention_dropout", 0.0),
        }

    def rope(self) -> tuple[float, dict[str, Any] | None]:
        """Return theta and the scaling, of `rope_parameters` (transformers 5) or `rope_theta`, `rope_scaling` (4)."""
        values = self.values
        given = mapping_of(values.get("rope_parameters")) or mapping_of(values.get("rope_scaling"))
        if any(is_mapping(item) for item in given.values()):
            raise self.error("rope_parameters differ between kinds of layers; expected one set for all")
        for source in (values, given):
            if source.get("partial_rotary_factor", 1.0) != 1.0:
                raise self.error(
                    f"partial_rotary_factor={str(source['partial_rotary_factor'])[:100]}: AttentionLayer rotates "
                    "whole heads"
                )
        given = {key: value for key, value in given.items() if value is not None}
        reader = _Reader({**values, **given}, self.where)
        theta = reader.number("rope_theta", 10000.0)
        kind = str(given.get("rope_type", given.get("type", "default")))
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, {"type": kind, "factor": reader.number("factor")}
        if kind == "dynamic":
            # Its frequencies change beyond the length of config.json itself; rope_parameters have none of their own.
            original = self.integer("max_position_embeddings")
            factor = reader.number("factor")
            return theta, {"type": kind, "factor": factor, "original_max_position_embeddings": original}
        if kind == "yarn":
            return theta, reader.yarn()
        if kind != "llama3":
            raise self.error(f"rope_type={kind[:100]} is not read from {CONFIG}; expected {', '.join(ROPE_TYPES)}")
        settings = {key: reader.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
        self.check_order(settings, "low_freq_factor", "high_freq_factor")
        original = reader.integer("original_max_position_embeddings")
        return theta, {"type": kind, **settings, "original_max_position_embeddings": original}

    def check_order(self, settings: dict[str, Any], low: str, high: str) -> None:
        """Refuse a band of frequencies that ends before it begins."""
        if settings[low] >= settings[high]:
            raise self.error(f"{low}={settings[low]:g} must be below {high}={settings[high]:g}")

    def yarn(self) -> dict[str, Any]:
        """Return YaRN's settings, where rope_parameters are next to the rest of config.json.

        `mscale` and `mscale_all_dim` give the attention factor as the quotient of theirs.
        """
        if self.values.get("truncate", True) is not True:
            raise self.error("truncate=false: RopeScalingConfig rounds the band of yarn to whole pairs")
        longest = self.values.get("max_position_embeddings")
        original = self.integer("original_max_position_embeddings", longest)
        if self.values.get("factor") is None:
            factor = self.integer("max_position_embeddings") / original
        else:
            factor = self.number("factor")
        settings: dict[str, Any] = {
            "type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": self.number("beta_fast", 32.0) or 32.0,
            "beta_slow": self.number("beta_slow", 1.0) or 1.0,
        }
        self.check_order(settings, "beta_slow", "beta_fast")
        if self.values.get("attention_factor") is not None:
            return settings | {"attention_factor": self.number("attention_factor")}
        scales = [self.number(key, 0.0) for key in ("mscale", "mscale_all_dim")]
        if all(scales):
            above, below = (0.1 * scale * math.log(factor) + 1.0 for scale in scales)
            return settings | {"attention_factor": above / below}
        return settings

    def windows(self) -> list[int | None]:
        """Return the sliding window of each layer, None where a layer sees everything."""
        values, depth = self.values, self.integer("num_hidden_layers")
        window = self.integer("sliding_window") if values.get("sliding_window") is not None else None
        if self.family == "llama":
            return [None] * depth
        if self.family == "mistral":
            if values.get("layer_types") is not None:
                raise self.error("layer_types: Mistral's layers have one window, others are of another family")
            return [window] * depth
        if not self.flag("use_sliding_window"):
            window = None
        kinds = values.get("layer_types")
        if kinds is None:
            first = self.integer("max_window_layers", least=0)
            return [window if layer >= first else None for layer in range(depth)]
        known = {"full_attention": None, "sliding_attention": window}
        if not is_sequence(kinds) or len(kinds) != depth or any(str(kind) not in known for kind in kinds):
            raise self.error(f"layer_types: expected {depth} of {', '.join(known)}, got {str(kinds)[:100]}")
        return [known[kind] for kind in kinds]

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.values.get(key, default)
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(f"{key}: expected an integer from {least} to {most}, got {quote(value)[:100]}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not abs(value) <= MAX_NUMBER:  # NaN is not within any bound
            raise self.error(f"{key}: expected a finite number, got {quote(value)[:100]}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.error(f"{key}: expected true or false, got {quote(value)[:100]}")
        return value

    def error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {text}")
