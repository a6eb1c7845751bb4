"""Reads GGUF files of plain Llama and Qwen models, unpacked once into a Hugging Face folder. No torch."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from caramba.config.optional_deps import need_library
from caramba.console import logger
from caramba.data.checkpoint.folder import CONFIG, SINGLE, fingerprint
from caramba.data.gguf_tokenizer import tokenizer_files
from caramba.errors import CheckpointError, quote
from caramba.runs.files import home, write_json, write_whole

if TYPE_CHECKING:
    from gguf import GGUFReader

MAGIC, VERSIONS = b"GGUF", (2, 3)
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every published Llama 3.1 to 3.3 has; a GGUF file stores the factors that follow, and not these."""

TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a GGUF block, and those of a Hugging Face Llama layer."""


def unpack_gguf(file: Path) -> Path:
    """Return a Hugging Face folder of a GGUF file, made under CARAMBA_HOME on first use: its weights in float32.

    Raises:
        CheckpointError: the file is truncated, of a newer format, or of an architecture that is not read.
        ConfigError: the gguf package is not installed.
    """
    check_header(file)
    need_library("gguf", "gguf", str(file))
    folder = home() / "gguf" / fingerprint(file)[:16] / file.stem
    if (folder / CONFIG).is_file():
        return folder
    reader = _open(file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = hf_config(metadata, _Tensors(reader, file), str(file))
    folder.parent.mkdir(parents=True, exist_ok=True)
    logger.info(f"{file}: unpacking its weights to float32 in {folder}")
    with tempfile.TemporaryDirectory(prefix=f".{file.stem}.", dir=folder.parent) as temporary:
        part = Path(temporary) / file.stem
        part.mkdir()
        _write_weights(part / SINGLE, _Tensors(reader, file), config)
        keys = _below(metadata, "tokenizer.ggml.")
        files = tokenizer_files(keys, metadata.get("tokenizer.chat_template"))
        if not files:
            logger.warning(
                f"{file}: its tokenizer ({keys.get('model')}, {keys.get('pre')}) is not read; name one with --tokenizer"
            )
        for name, text in files.items():
            write_whole(part / name, text)
        write_json(part / CONFIG, config)
        if not folder.is_dir():  # another process may have been faster
            os.replace(part, folder)
    return folder


def check_header(file: Path) -> None:
    """Check a GGUF file's first bytes.

    Raises:
        CheckpointError: not a GGUF file, of another byte order, or of a version that is not read.
    """
    with open(file, "rb") as stream:
        head = stream.read(24)
    if head[:4] != MAGIC:
        raise CheckpointError(
            f"{file}: not a GGUF file, its first bytes are {quote(head[:4])}, expected {MAGIC!r}; download it again"
        )
    if len(head) < 24:
        raise CheckpointError(f"{file}: truncated after {len(head)} bytes; download it again")
    (version,) = struct.unpack("<I", head[4:8])
    if version not in VERSIONS:
        order = "of big-endian byte order" if version & 0xFFFF == 0 else f"of GGUF version {version}"
        raise CheckpointError(
            f"{file}: {order}, expected version {' or '.join(map(str, VERSIONS))} in little-endian order; convert it "
            "with a llama.cpp of that version"
        )


def _open(file: Path) -> GGUFReader:
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        if "is not a valid GGMLQuantizationType" in str(error) or "is not a valid GGUFValueType" in str(error):
            raise CheckpointError(
                f"{file}: newer than the gguf package ({error}); pip install -U gguf, or convert the file to F16"
            ) from None
        raise CheckpointError(
            f"{file}: truncated or damaged, its {file.stat().st_size:,} bytes end before what its header lists "
            f"({str(error)[:100]}); download it again"
        ) from error


class _Tensors(Mapping[str, np.ndarray]):
    """The tensors of a file by name, dequantised to float32 as they are asked for."""

    def __init__(self, reader: GGUFReader, file: Path) -> None:
        self._found = {tensor.name: tensor for tensor in reader.tensors}
        self._file = file

    def __getitem__(self, name: str) -> np.ndarray:
        from gguf import dequantize

        tensor = self._found[name]
        try:
            return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError:
            raise CheckpointError(
                f"{self._file}: {name} is of type {tensor.tensor_type.name}, which the gguf package cannot read; "
                "convert the file to F16, Q8_0 or Q4_0"
            ) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._found[name].shape))


def hf_config(metadata: Mapping[str, Any], tensors: _Tensors, where: str) -> dict[str, Any]:
    """Return the config.json of a GGUF file's model.

    Raises:
        CheckpointError: an architecture that is not read, or a missing key.
    """
    family = str(metadata.get("general.architecture"))
    if family not in FAMILIES:
        raise CheckpointError(
            f"{where}: general.architecture={quote(family)} is not read; expected {', '.join(FAMILIES)}"
        )
    keys = _below(metadata, f"{family}.")

    def number(name: str, default: Any = None) -> Any:
        value = keys.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(
                f"{where}: {family}.{name} is {quote(value)}, expected a number; download the file again"
            )
        return value

    if keys.get("expert_count", 0):
        raise CheckpointError(f"{where}: a mixture of {keys['expert_count']} experts, and no expert layer is read")
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{where}: has no token_embd.weight; it is one part of a split file, merge the parts")
    heads = number("attention.head_count")
    width = number("embedding_length")
    rope: dict[str, Any] = {"rope_theta": _short(number("rope.freq_base", 10000.0))}
    scaling = _scaling(keys, tensors, rope["rope_theta"], where)
    config: dict[str, Any] = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": tensors.shape("token_embd.weight")[0],
        "hidden_size": width,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": number("attention.key_length", width // heads),
        "hidden_act": "silu",
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": _short(number("attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_scaling": scaling,
        "dtype": "float32",
        **rope,
    }
    if family == "llama":
        config |= {
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }
    else:
        config |= {
            "use_sliding_window": False,
            "attention_bias": family == "qwen3" and "blk.0.attn_q.bias" in tensors,
        }
    for name in ("bos", "eos"):
        config[f"{name}_token_id"] = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return config


def _short(value: float) -> float:
    """Return the shortest number that rounds to a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _scaling(keys: Mapping[str, Any], tensors: _Tensors, theta: float, where: str) -> dict[str, Any] | None:
    kind = keys.get("rope.scaling.type", "none")
    factor = float(keys.get("rope.scaling.factor", 1.0))
    if "rope_freqs.weight" in tensors:
        stored = tensors["rope_freqs.weight"].astype(np.float64)
        found = LLAMA3_SCALING | {"factor": float(np.float32(stored.max()))}
        if np.allclose(stored, llama3_factors(2 * len(stored), theta, found), rtol=1e-3):
            return {"rope_type": "llama3", **found}
        raise CheckpointError(
            f"{where}: rope_freqs.weight are not the factors of Llama 3.1 to 3.3, and no other are read"
        )
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = keys.get("rope.scaling.original_context_length", keys.get("context_length"))
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise CheckpointError(f"{where}: rope.scaling.type={quote(kind)} is not read; expected none, linear or yarn")


def llama3_factors(width: int, theta: float, scaling: Mapping[str, Any]) -> np.ndarray:
    """Return what Llama 3's scaling divides each rotary frequency by, [width / 2]."""
    frequencies = theta ** -(np.arange(0, width, 2, dtype=np.float64) / width)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / (kept + (1.0 - kept) / scaling["factor"])


def interleave_pairs(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Reorder each head's rows so that rotary pairs are neighbours.

    Pair p is rows p and p + D/2 before, rows 2p and 2p + 1 after.
    """
    return rows.reshape(n_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _halve_pairs(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Undo `interleave_pairs`."""
    return rows.reshape(n_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_weights(file: Path, tensors: _Tensors, config: Mapping[str, Any]) -> None:
    """Write the tensors under their Hugging Face names; a Llama's queries and keys are stored interleaved."""
    from safetensors.numpy import save_file

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, np.ndarray] = {}
    for name in tensors:
        if name == "rope_freqs.weight":
            continue
        module, _, kind = name.rpartition(".")
        layer, own = "", module
        if module.startswith("blk."):
            _, index, own = module.split(".", 2)
            layer = f"model.layers.{index}."
        table = LAYER_NAMES if layer else TOP_NAMES
        value = tensors[name]
        if config["model_type"] == "llama" and own in heads:
            value = _halve_pairs(value, heads[own])
        found[f"{layer}{table.get(own, own)}.{kind}"] = np.ascontiguousarray(value)
    save_file(found, file, metadata={"format": "pt"})


def _below(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}
