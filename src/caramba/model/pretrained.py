"""Models on disk: safetensors whose metadata describes the network, runs, and Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from caramba.config.hf import is_remote, read_hf_config, spec_of_folder
from caramba.config.model import ModelSpec
from caramba.config.source import parse_object
from caramba.data.checkpoint import index_tensors, load_into, save_tensors, stream_into
from caramba.data.checkpoint.folder import is_dcp
from caramba.data.checkpoint.formats import is_own_format, read_model_metadata, read_model_tensors
from caramba.data.checkpoint.locate import FORMAT
from caramba.data.checkpoint.network import check_network, read_spec, spec_of
from caramba.data.checkpoint.shards import match_stored
from caramba.errors import CheckpointError, DataError
from caramba.model.hf_folder import load_hf_folder
from caramba.model.model import Model, build_empty

if TYPE_CHECKING:
    pass


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
        from caramba.model.hf_folder import load_remote_folder  # runs code of the folder; most have none

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
    labels = parse_object(
        metadata.get("labels", "{}"), f"{path}: labels", CheckpointError, "restore the file"
    )
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
