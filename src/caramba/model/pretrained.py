"""Models on disk: safetensors whose metadata describes the network, so a file is enough to build it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from caramba.checkpoint import load_into, load_tensors, read_metadata, save_tensors
from caramba.config.model import ModelSpec
from caramba.errors import CheckpointError, DataError
from caramba.model.build import build_model
from caramba.model.model import Model

SPEC_KEYS = ("type", "name", "embedder", "topology", "head")


def spec_of(model: ModelSpec) -> ModelSpec:
    """Return only what describes the network, without teacher, surgery or checkpoint."""
    return ModelSpec.model_validate(
        {key: value for key, value in model.model_dump(mode="json").items() if key in SPEC_KEYS}
    )


def save_model(
    model: Model, path: Path, *, role: str, phase: str, labels: dict[str, str], tokenizer_hash: str = ""
) -> None:
    """Write a model's weights whole, with its description, its role (teacher or student) and labels in the metadata."""
    metadata = {
        "format": "caramba-1",
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
    """Build the model that a file describes and load its weights; return it in eval mode, with the file's labels.

    Raises:
        CheckpointError: the file is not a caramba model, or describes another network than `expected`.
        DataError: the weights were trained on text of another tokenizer than `tokenizer_hash`.
    """
    metadata = read_metadata(path)
    if "spec" not in metadata:
        raise CheckpointError(
            f"{where}: {path} does not describe its network; use a file that caramba wrote under RUN/checkpoints/"
        )
    spec = ModelSpec.model_validate(json.loads(metadata["spec"]))
    if expected is not None and _shape(spec) != _shape(expected):
        raise CheckpointError(
            f"{where}: {path} holds another network than the manifest describes; "
            "remove the manifest's description of it, or name the checkpoint that belongs to it"
        )
    trained_on = metadata.get("tokenizer_hash", "")
    if trained_on and tokenizer_hash and trained_on != tokenizer_hash:
        raise DataError(
            f"{where}: {path} was trained on tokens of tokenizer {trained_on[:12]}, "
            f"the data has {tokenizer_hash[:12]}; "
            "use the data that it was trained on, or train a new model"
        )
    model = build_model(spec)
    load_into(model, load_tensors(path), where=str(path))
    return model.to(device).eval(), json.loads(metadata.get("labels", "{}"))


def find_checkpoint(place: Path, *, role: str) -> Path:
    """Return the weights of `role` in a run directory (its last phase of that role, else its last), or the file itself.

    Raises:
        CheckpointError: nothing there holds weights.
    """
    if place.is_file():
        return place
    found = [*place.glob("checkpoints/*.safetensors"), *place.glob("groups/*/checkpoints/*.safetensors")]
    files = sorted(found, key=lambda file: file.stat().st_mtime)
    files = [file for file in files if read_metadata(file).get("role") != "control"]
    if not files:
        raise CheckpointError(
            f"{place}: no finished phase under checkpoints/; name a run that finished, or a .safetensors file"
        )
    matching = [file for file in files if read_metadata(file).get("role") == role]
    return (matching or files)[-1]


def _shape(spec: ModelSpec) -> dict[str, object]:
    return {key: value for key, value in spec_of(spec).model_dump(mode="json").items() if key != "name"}
