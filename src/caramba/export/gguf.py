"""One GGUF file of a model, for llama.cpp and what is built on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from caramba.config.attention import AttentionMode
from caramba.config.layer import AttentionLayerConfig
from caramba.config.optional_deps import need_library
from caramba.config.topology import attention_configs
from caramba.data.checkpoint.gguf_file import LAYER_NAMES, TOP_NAMES, interleave_pairs, llama3_factors
from caramba.data.checkpoint.hf_names import hf_names, llama_blocks
from caramba.data.gguf_tokenizer import tokenizer_metadata
from caramba.errors import ConfigError, nearest
from caramba.export.llama import llama_config, why_not_llama
from caramba.export.tokenizer import definition_of, find_template
from caramba.infer.model_bundle import ModelBundle

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter

WEIGHTS = ("f16", "q8_0", "q4_0")
ALIGNED = 32
"""Numbers of a quantised block: matrices with other row lengths stay in 16 bits."""
_BYTES_OF_TABLES = "q8_0"  # the embedding and the head of a 4-bit file, as llama.cpp keeps them above 4 bits


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a GGUF file: its name, and the function that computes it when its turn comes.

    `keeps` states the type that it has whatever `--weights` asks for.
    """

    name: str
    shape: tuple[int, ...]
    value: Callable[[], Tensor | np.ndarray]
    keeps: str | None = None


def check_weights(name: str) -> str:
    """Return a known type of weights.

    Raises:
        ConfigError: unknown, with the nearest name.
    """
    if name not in WEIGHTS:
        raise ConfigError(
            f"export: --weights {name!r} is unknown{nearest(name, WEIGHTS) or ';'} types: {', '.join(WEIGHTS)}"
        )
    return name


def write_gguf(
    opened: ModelBundle, folder: Path, weights: str, keys: dict[str, Any], tensors: list[NamedTensor]
) -> str:
    """Write a GGUF file of these metadata keys and tensors with the model's tokenizer; return its architecture.

    Tensors are converted and written one at a time.

    Raises:
        ConfigError: the tokenizer cannot be expressed, or a weight is too large for 16 bits.
    """
    need_library("gguf", "gguf", "export --format gguf")
    from gguf import GGUFWriter, LlamaFileType

    arch = keys.pop("general.architecture")
    name = opened.model.spec.name or "model"
    writer = GGUFWriter(folder / f"{name}-{weights}.gguf", arch)
    kinds = {
        "f16": LlamaFileType.MOSTLY_F16,
        "q8_0": LlamaFileType.MOSTLY_Q8_0,
        "q4_0": LlamaFileType.MOSTLY_Q4_0,
    }
    writer.add_name(name)
    writer.add_file_type(kinds[weights])
    writer.add_quantization_version(2)
    for key, value in keys.items():
        _add(writer, f"{arch}.{key}", value)
    _add_tokenizer(writer, opened)
    types = [_type_of(tensor, weights) for tensor in tensors]
    for tensor, kind in zip(tensors, types, strict=True):
        _announce(writer, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor, kind in zip(tensors, types, strict=True):
        writer.write_tensor_data(_encode(tensor, kind))
    writer.close()
    return arch


def gguf_llama(opened: ModelBundle) -> tuple[dict[str, Any], list[NamedTensor]]:
    """Return the metadata keys and tensors of a plain Llama's or Qwen 2's file.

    Raises:
        ConfigError: a model of another shape.
    """
    reason = why_not_llama(opened.model.spec)
    if reason is not None:
        layers = attention_configs(opened.model.spec.topology)
        decoupled = [layer for layer in layers if layer.mode is AttentionMode.DECOUPLED]
        if decoupled:
            reason = f"its attention has {obstacles(decoupled[0])}"
        raise ConfigError(
            f"export --format gguf: stock engines cannot hold this model: {reason}; make the student with "
            "model.surgery.target: mla (docs/export.md), or export --format hf, which carries its own code"
        )
    model = opened.model
    blocks, _ = llama_blocks(model.spec)
    attention = blocks[0].attention[1]
    config = llama_config(model.spec, max_positions=opened.max_positions, eos_id=None, dtype="float32")
    family = config["model_type"]
    state, names = opened.weights, {theirs: ours for ours, theirs in hf_names(model.spec).items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    heads = {}
    if family == "llama":  # its queries and keys have neighbours as rotary pairs
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    keys = {"general.architecture": family, **common_keys(config), **_rope_keys(attention)}
    tensors = [
        make_tensor(gguf, shapes[names[theirs]], state, names[theirs], heads.get(gguf.split(".")[-2]))
        for theirs, gguf in gguf_names(len(blocks), list(names))
    ]
    if attention.rope_scaling is not None and attention.rope_scaling.type == "llama3":
        scaling = attention.rope_scaling.model_dump()
        factors = llama3_factors(config["head_dim"], attention.rope_base, scaling).astype(np.float32)
        tensors.append(NamedTensor("rope_freqs.weight", factors.shape, lambda: factors, keeps="f32"))
    return keys, tensors


def obstacles(attention: AttentionLayerConfig) -> str:
    """Return the keys of a layer that keep it out of engines, and what each has to be before surgery."""
    found = {"layout": (attention.layout, "latent")} if attention.layout != "latent" else {}
    found |= attention.outside_mla()
    keys = [f"{name}={str(value).lower()} (set {name}: {neutral})" for name, (value, neutral) in found.items()]
    return ", ".join([*keys, f"mla={str(attention.mla).lower()} (set mla: true)"])


def common_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Return the metadata that every architecture has, of a config.json."""
    return {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": config["head_dim"],
        "rope.freq_base": config["rope_theta"],
    }


def _rope_keys(attention: AttentionLayerConfig) -> dict[str, Any]:
    scaling = attention.rope_scaling
    if scaling is None or scaling.type == "llama3":  # whose factors are a tensor
        return {}
    if scaling.type == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": scaling.factor}
    raise ConfigError(
        f"export --format gguf: rope_scaling type={scaling.type} is not written to GGUF; export --format hf and "
        "convert the folder with llama.cpp's own convert_hf_to_gguf.py"
    )


def gguf_names(depth: int, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (Hugging Face name, GGUF name) of these tensors, those of one layer together."""
    modules = {theirs: f"{ours}" for ours, theirs in TOP_NAMES.items()}
    for index in range(depth):
        modules |= {f"model.layers.{index}.{theirs}": f"blk.{index}.{ours}" for ours, theirs in LAYER_NAMES.items()}
    for name in names:
        module, _, kind = name.rpartition(".")
        yield name, f"{modules[module]}.{kind}"


def make_tensor(
    name: str, shape: tuple[int, ...], state: Mapping[str, Tensor], ours: str, n_heads: int | None
) -> NamedTensor:
    """Return a tensor under its GGUF name; with `n_heads` each head's rotary pairs become neighbours."""

    def value() -> Tensor | np.ndarray:
        return state[ours] if n_heads is None else interleave_pairs(as_array(state[ours]), n_heads)

    return NamedTensor(name, shape, value)


def as_array(tensor: Tensor | np.ndarray) -> np.ndarray:
    """Return a float32 array of a tensor."""
    return tensor if isinstance(tensor, np.ndarray) else tensor.detach().to("cpu", torch.float32).numpy()


def _type_of(tensor: NamedTensor, weights: str) -> GGMLQuantizationType:
    from gguf import GGMLQuantizationType

    if tensor.keeps is not None or len(tensor.shape) == 1:
        return GGMLQuantizationType[(tensor.keeps or "f32").upper()]
    if weights == "q4_0" and tensor.name in ("token_embd.weight", "output.weight"):
        weights = _BYTES_OF_TABLES
    return GGMLQuantizationType[weights.upper() if tensor.shape[-1] % ALIGNED == 0 else "F16"]


def _announce(writer: GGUFWriter, tensor: NamedTensor, kind: GGMLQuantizationType) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quant_shape_to_byte_shape

    block, size = GGML_QUANT_SIZES[kind]
    n_bytes = int(np.prod(tensor.shape)) // block * size
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
    if kind in plain:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(plain[kind]), n_bytes)
    else:
        in_bytes = quant_shape_to_byte_shape(tensor.shape, kind)
        writer.add_tensor_info(tensor.name, in_bytes, np.dtype(np.uint8), n_bytes, raw_dtype=kind)


def _encode(tensor: NamedTensor, kind: GGMLQuantizationType) -> np.ndarray:
    from gguf import GGMLQuantizationType, quantize

    value = np.ascontiguousarray(as_array(tensor.value()), dtype=np.float32)
    if kind is GGMLQuantizationType.F16 and np.abs(value).max(initial=0.0) > np.finfo(np.float16).max:
        raise ConfigError(
            f"export: {tensor.name} holds {np.abs(value).max():.4g}, and the largest number of float16 is "
            f"{np.finfo(np.float16).max:.4g}; use --weights q8_0"
        )
    return quantize(value, kind)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)


def _add_tokenizer(writer: GGUFWriter, opened: ModelBundle) -> None:
    tokenizer = opened.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"export --format gguf: {opened.path} comes without a tokenizer, and a GGUF file holds one; export a run "
            "whose data is a token folder, or a folder with tokenizer.json"
        )
    found = tokenizer_metadata(
        json.loads(definition_of(tokenizer)),
        opened.model.spec.embedder.vocab_size,
        tokenizer.eos_id,
        "export --format gguf",
    )
    writer.add_tokenizer_model(found["model"])
    writer.add_tokenizer_pre(found["pre"])
    writer.add_token_list(found["tokens"])
    writer.add_token_types(found["token_type"])
    end = found["tokens"][tokenizer.eos_id]
    # llama.cpp refuses an empty list; a merge of two end marks never applies.
    writer.add_token_merges(found["merges"] or [f"{end} {end}"])
    writer.add_eos_token_id(tokenizer.eos_id)
    writer.add_pad_token_id(tokenizer.eos_id)
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    writer.add_add_bos_token(tokenizer.adds_bos)
    writer.add_add_space_prefix(False)
    template = find_template(opened)
    if template is not None:
        writer.add_chat_template(template)
