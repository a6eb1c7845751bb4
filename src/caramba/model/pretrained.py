"""Models on disk: safetensors whose metadata describes the network, runs, and Hugging Face folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from caramba.config.hf import CONFIG, is_remote, read_hf_config, spec_of_folder
from caramba.config.model import ModelSpec
from caramba.config.source import parse_object
from caramba.data.checkpoint import (
    index_tensors,
    is_same_tensor,
    load_into,
    save_tensors,
    stream_into,
    weight_files,
)
from caramba.data.checkpoint.folder import is_dcp
from caramba.data.checkpoint.formats import is_own_format, read_model_metadata, read_model_tensors
from caramba.data.checkpoint.hf_names import EMBEDDING, FREQUENCIES, HEAD, hf_names
from caramba.data.checkpoint.locate import FORMAT
from caramba.data.checkpoint.network import check_network, read_spec, spec_of
from caramba.data.checkpoint.shards import StoredTensor, StoredWeights, match_stored
from caramba.errors import CheckpointError, DataError
from caramba.layer.rope import RotaryEmbedding, rope_frequencies
from caramba.model.model import Model, build_empty, build_model


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
    check_network(spec, expected, folder, where)
    tables = {name: stored.pop(name) for name in list(stored) if name.endswith(FREQUENCIES)}
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
    _check_frequencies(model, tables, f"{where}={folder}")
    model = model.to_empty(device=device)
    stream_into(model, stored, where=f"{where}={folder}", names=hf_names(spec))
    return model.eval()


def _check_frequencies(model: Model, tables: Mapping[str, StoredTensor], where: str) -> None:
    """Check rotary frequencies that a folder stores, perhaps in half precision, against those of config.json.

    Raises:
        CheckpointError: others, neither those of the model nor those before its scaling.
    """
    ropes = [module for module in model.modules() if isinstance(module, RotaryEmbedding)]
    stored = StoredWeights(tables, where)
    for name in tables:
        found = stored[name].flatten()
        known = [
            each
            for rope in ropes[:1]
            for each in (rope.inv_freq[0], rope_frequencies(2 * rope.inv_freq.shape[1], rope.base))
        ]
        if not any(
            each.shape == found.shape and torch.allclose(each.cpu(), found, rtol=1e-2, atol=1e-6) for each in known
        ):
            raise CheckpointError(
                f"{where}: {name} holds other frequencies than config.json gives; correct its rope_theta or "
                "rope_scaling, or remove the tensor"
            )


PREFIX = "model."  # of every tensor: the exported class holds the network under this name


def load_remote_folder(folder: Path, *, device: torch.device | str = "cpu", where: str = "RUN") -> Model:
    """Build the network that config.json describes and read the weights into it, as float32; return it in eval mode.

    Raises:
        CheckpointError: the folder is incomplete, damaged, or was written before exports described themselves.
    """
    spec = spec_of_folder(folder)
    model = build_empty(spec, device)
    kept = {name: PREFIX + name for name in model.state_dict()}
    # The folder also holds what a network computes when it is built, which transformers would otherwise leave empty.
    computed = {PREFIX + name: item for name, item in model.named_buffers()}
    stored: dict[str, StoredTensor] = {}
    for name, item in index_tensors(weight_files(folder)).items():
        if name in kept.values() or name not in computed:
            stored[name] = item  # unknown names are refused by stream_into
        elif not _is_computed(item, name, computed[name]):
            raise CheckpointError(
                f"{item.file}: {name} differs from what the network computes, expected equal values; export it again"
            )
    stream_into(model, stored, where=f"{where}={folder}", names=kept)
    return model.eval()


def _is_computed(stored: StoredTensor, name: str, computed: torch.Tensor) -> bool:
    """Whether a stored tensor has the values that the network computes, up to rounding on another device."""
    from safetensors import safe_open

    if stored.shape != computed.shape:
        return False
    with safe_open(stored.file, framework="pt") as file:
        found = file.get_tensor(name)
    expected = computed.cpu().to(found.dtype)
    if not found.is_floating_point():
        return torch.equal(found, expected)
    tolerance = 4 * torch.finfo(found.dtype).eps
    return torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance, equal_nan=True)


def save_model(
    model: Model, path: Path, *, role: str, phase: str, labels: dict[str, str], tokenizer_hash: str = ""
) -> None:
    """Write a model's weights whole, with its description, its role (teacher or student) and labels in the metadata."""
    metadata = {
        "format": FORMAT,
        "spec": spec_of(model.spec).model_dump_json(),
        "role": role,
        "phase": phase,
        "labels": json.dumps(labels),
        "tokenizer_hash": tokenizer_hash,
    }
    save_tensors(
        path,
        {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()},
        metadata,
    )


def load_pretrained(
    path: Path,
    *,
    expected: ModelSpec | None = None,
    device: torch.device | str = "cpu",
    where: str = "checkpoint",
    tokenizer_hash: str = "",
) -> tuple[Model, dict[str, str]]:
    """Build the model of a file or Hugging Face folder and load its weights.

    Returns it in eval mode, with the file's labels. Weights are read straight into place, as float32. On the device
    `meta` those of a safetensors file are compared with the model and not read; others are read into host memory.

    Raises:
        CheckpointError: the file is not a caramba model, or describes another network than `expected`.
        DataError: the weights were trained on text of another tokenizer than `tokenizer_hash`.
    """
    is_described = torch.device(device).type == "meta"
    if is_described and (path.is_dir() or is_own_format(path)):
        device, is_described = "cpu", False
    if path.is_dir() and not is_dcp(path):
        config = read_hf_config(path)
        labels = config.get("caramba", {}).get("labels", {})
        if not is_remote(config):
            return load_hf_folder(path, expected=expected, device=device, where=where), labels
        check_network(spec_of_folder(path), expected, path, where)
        return load_remote_folder(path, device=device, where=where), labels
    metadata = read_model_metadata(path)
    if "spec" not in metadata:
        raise CheckpointError(
            f"{where}: {path} does not describe its network; use a file that caramba wrote under RUN/checkpoints/, "
            "or its Hugging Face folder, with its config.json"
        )
    spec = read_spec(metadata["spec"], path, where)
    check_network(spec, expected, path, where)
    trained_on = metadata.get("tokenizer_hash", "")
    if trained_on and tokenizer_hash and trained_on != tokenizer_hash:
        raise DataError(
            f"{where}: {path} was trained on tokens of tokenizer {trained_on[:12]}, "
            f"the data has {tokenizer_hash[:12]}; "
            "use the data that it was trained on, or train a new model"
        )
    model = build_empty(spec, device)
    if is_described:
        match_stored(model, index_tensors((path,)), where=f"{where}={path}", allows_meta=True)
    elif is_own_format(path):
        load_into(model, read_model_tensors(path), where=str(path))
        refuse_not_finite(model, f"{where}={path}")
    else:
        stream_into(model, index_tensors((path,)), where=f"{where}={path}")
    labels = parse_object(metadata.get("labels", "{}"), f"{path}: labels", CheckpointError, "restore the file")
    return model.eval(), {key: str(value) for key, value in labels.items()}


def refuse_not_finite(model: Model, where: str) -> None:
    """Refuse weights that hold NaN or infinity, where they were not read tensor by tensor.

    Raises:
        CheckpointError: names the tensors and how many of their values are not finite.
    """
    found: list[str] = []
    for name, tensor in model.named_parameters():
        if tensor.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(tensor.detach())):
            count = tensor.numel() - int(tensor.detach().isfinite().sum())
            found.append(f"{name} ({count:,} of {tensor.numel():,} values)")
    if found:
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        raise CheckpointError(
            f"{where}: values that are not finite in {', '.join(found[:4])}{more}; the files are damaged, or "
            "were cast to a type that their values overflow: download or convert them again"
        )
