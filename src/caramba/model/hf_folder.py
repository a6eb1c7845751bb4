"""Models of Hugging Face folders: built from config.json, the safetensors streamed into place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from caramba.config.hf import CONFIG, read_hf_config, spec_of_folder
from caramba.config.layer import AttentionLayerConfig
from caramba.config.model import ModelSpec
from caramba.data.checkpoint import index_tensors, is_same_tensor, signature, stream_into, weight_files
from caramba.data.checkpoint.hf_names import DERIVED_SUFFIXES, EMBEDDING, HEAD, hf_names, llama_blocks
from caramba.errors import CheckpointError
from caramba.model.build import build_model
from caramba.model.model import Model
from caramba.runs.files import check_file, write_json

LOADED = "loaded.json"


def load_hf_folder(
    folder: Path,
    *,
    expected: ModelSpec | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    where: str = "model.path",
) -> Model:
    """Build the model of a Hugging Face folder and read its weights into it; return it in eval mode.

    Host memory peaks at the model plus some megabytes: no tensor is in memory twice.

    Args:
        expected: the description that the folder has to agree with, if there is one.
        dtype: of the weights in memory, whatever the files hold.

    Raises:
        CheckpointError: the folder is incomplete, damaged, unsupported, or of another network than `expected`.
    """
    spec = spec_of_folder(folder)
    stored = index_tensors(weight_files(folder))
    if (depth := int(read_hf_config(folder)["num_hidden_layers"])) > len(stored):
        raise CheckpointError(
            f"{where}: {folder / CONFIG}: num_hidden_layers={depth}, expected at most the {len(stored)} tensors of its "
            "weights; download the folder again"
        )
    if expected is not None and (reason := difference(spec, expected)):
        raise CheckpointError(
            f"{where}: {folder} holds another network than the manifest describes: {reason}; remove the manifest's "
            "description of it, or name the checkpoint that belongs to it"
        )
    stored = {name: item for name, item in stored.items() if not name.endswith(DERIVED_SUFFIXES)}
    if spec.head.tied and (head := stored.pop(HEAD[1], None)) is not None:
        embedding = stored.setdefault(EMBEDDING[1], head)
        if embedding is not head and not is_same_tensor(embedding, head):
            raise CheckpointError(
                f"{where}: {folder} stores {HEAD[1]} and {EMBEDDING[1]} with different values, and config.json has "
                "tie_word_embeddings: true; set it to false, or remove one tensor"
            )
    model = build_model(spec, device="meta").to(dtype)
    described, held = (
        sum(item.numel() for item in model.parameters()),
        sum(item.shape.numel() for item in stored.values()),
    )
    if described > 2 * held:  # refused before memory for it is allocated
        raise CheckpointError(
            f"{where}: {folder / CONFIG} describes {described:,} weights, its files hold {held:,}; download the folder "
            "again"
        )
    model = model.to_empty(device=device)
    stream_into(model, stored, where=f"{where}={folder}", names=hf_names(spec))
    return model.eval()


def difference(found: ModelSpec, expected: ModelSpec) -> str:
    """Return the first difference between two Llama-shaped networks in words, or nothing when they are one.

    Defaults count as what they stand for: `head_dim` left out equals d_model / n_heads.
    """
    if found.embedder != expected.embedder or found.head != expected.head:
        return f"embedder and head {_text(found)}, expected {_text(expected)}"
    ours, (_, our_norm) = llama_blocks(found)
    try:
        theirs, (_, their_norm) = llama_blocks(expected)
    except CheckpointError as error:
        return str(error)
    if len(ours) != len(theirs):
        return f"{len(ours)} blocks, expected {len(theirs)}"
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        here, there = _attention(one.attention[1]), _attention(other.attention[1])
        for key, value in here.items():
            if value != there[key]:
                return f"block {index} has {key}={value}, expected {there[key]}"
        for name in ("attention_norm", "feed_forward_norm", "feed_forward"):
            if getattr(one, name)[1] != getattr(other, name)[1]:
                return f"block {index} has {getattr(one, name)[1]!r}, expected {getattr(other, name)[1]!r}"
    return "" if our_norm == their_norm else f"final norm {our_norm!r}, expected {their_norm!r}"


def _attention(config: AttentionLayerConfig) -> dict[str, Any]:
    same = ("d_model", "rope_enabled", "rope_base", "rope_scaling", "local_window", "bias", "qk_norm")
    dims = config.dims()
    values = {"n_heads": dims.n_heads, "n_kv_heads": dims.n_kv_heads, "head_dim": dims.qk}
    values |= {name: getattr(config, name) for name in same}
    return values | {"qk_norm_eps": config.qk_norm_eps if config.qk_norm else None}


def _text(spec: ModelSpec) -> str:
    return f"({spec.embedder.vocab_size} x {spec.embedder.d_model}, tied={spec.head.tied})"


# --- a run that loaded a folder and trained nothing keeps a reference to it, not a copy of its weights


def record_loaded(run_dir: Path, role: str, folder: Path) -> dict[str, str]:
    """Write which folder a run's model of `role` was read from, and its signature; return both as labels.

    Raises:
        CheckpointError: the run, now resumed, read other files from that folder before.
    """
    if find_loaded_folder(run_dir, role) != folder.absolute():
        entry = {"path": str(folder.absolute()), "signature": signature(folder)}
        write_json(run_dir / "checkpoints" / LOADED, _references(run_dir) | {role: entry})
    found = _references(run_dir)[role]
    return {f"{role}_weights": found["path"], f"{role}_weights_signature": found["signature"]}


def find_loaded_folder(run_dir: Path, role: str | None = None) -> Path | None:
    """Return the folder that a run read its model of `role` (None: of any) from, or None.

    Raises:
        CheckpointError: the folder is gone, or its files are others than the run read.
    """
    found = _references(run_dir)
    entry = found.get(role) if role else next(iter(found.values()), None)
    if entry is None:
        return None
    folder = Path(entry["path"])
    if not folder.is_dir():
        raise CheckpointError(
            f"{run_dir}: its weights were read from {folder}, which is no longer there; put the folder back"
        )
    if signature(folder) != entry["signature"]:
        raise CheckpointError(
            f"{run_dir}: its weights were read from {folder}, and that folder has changed since; start a new run"
        )
    return folder


def _references(run_dir: Path) -> dict[str, dict[str, str]]:
    file = run_dir / "checkpoints" / LOADED
    check_file(file)
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return {
            role: {key: str(entry[key]) for key in ("path", "signature")} for role, entry in found.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: cannot be read as the record of folders ({type(error).__name__}); restore it"
        ) from error
