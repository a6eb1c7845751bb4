"""Models on disk: safetensors whose metadata describes the network, runs, and Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from caramba.config.hf import is_hf_folder, is_remote, read_hf_config, spec_of_folder
from caramba.config.json_file import parse_object
from caramba.config.model import ModelSpec
from caramba.config.parse import parse_as
from caramba.data.checkpoint import index_tensors, load_into, read_metadata, save_tensors, stream_into
from caramba.data.checkpoint.formats import is_dcp, is_own_format, read_model_metadata, read_model_tensors
from caramba.data.checkpoint.sharded import MODEL, latest_sharded_state
from caramba.data.checkpoint.shards import match_stored
from caramba.errors import CheckpointError, ConfigError, DataError
from caramba.model.build import build_empty
from caramba.model.hf_folder import find_loaded_folder, load_hf_folder
from caramba.model.model import Model
from caramba.runs import MANIFEST, read_manifest

if TYPE_CHECKING:
    from caramba.runs.stages import FinishedStage

EXPORTED = ("model.safetensors", "model.ckpt")  # in a folder of `caramba export --format safetensors|ckpt`
FORMAT = "caramba-1"
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
        _check_shape(spec_of_folder(path), expected, path, where)
        from caramba.model.remote_folder import load_remote_folder  # runs code of the folder; most have none

        return load_remote_folder(path, device=device, where=where), labels
    metadata = read_model_metadata(path)
    if "spec" not in metadata:
        raise CheckpointError(
            f"{where}: {path} does not describe its network; use a file that caramba wrote under RUN/checkpoints/, "
            "or its Hugging Face folder, with its config.json"
        )
    spec = _spec_in(metadata["spec"], path, where)
    _check_shape(spec, expected, path, where)
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


def _spec_in(text: str, path: Path, where: str) -> ModelSpec:
    """Read the network that a file of weights describes, with the types of the plugins in use.

    Raises:
        CheckpointError: this version, or these plugins, do not know it.
    """
    plain = parse_object(text, f"{where}: {path}: spec", CheckpointError, "restore the file")
    try:
        return parse_as(ModelSpec, plain)
    except ConfigError as error:
        raise CheckpointError(
            f"{where}: {path} describes a network that is not known here: {error}. If it has layers of your own, open "
            "the run that trained it, or name their module in plugins of a manifest that reads this file"
        ) from None


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


def find_checkpoint(place: Path, *, role: str) -> Path:
    """Return the path of a role's weights in a run, or of a file, export or Hugging Face folder.

    A sharded training state counts as a file.

    Of a run: the last stage on record of that role, else the folder that its model of that role was read from, else
    the last stage, else any folder that it read. Times and names of files do not count.

    Raises:
        CheckpointError: nothing there holds weights, a file on record is missing or foreign, or the folder that a run
            read has changed.
    """
    if (sharded := latest_sharded_state(place)) is not None:
        return sharded / MODEL
    if place.is_file() or is_dcp(place) or (is_hf_folder(place) and not (place / MANIFEST).is_file()):
        return place
    if not (place / MANIFEST).is_file():
        own = next((place / name for name in EXPORTED if (place / name).is_file()), None)
        if own is not None:
            return own
    finished = _finished(place)
    own = [stage for stage in finished if stage.role == role]
    folder = None if own else find_loaded_folder(place, role)
    if folder is None and not finished:
        folder = find_loaded_folder(place)
    if folder is not None:
        return folder
    if not finished:
        raise CheckpointError(
            f"{place}: no finished phase under checkpoints/; name a run that finished, a .safetensors file, "
            "or a Hugging Face folder"
        )
    return _check_recorded((own or finished)[-1])


def _finished(place: Path) -> list[FinishedStage]:
    """Return the stages of a run, or of a group of one, that saved weights, in order, without controls.

    A run without any record has the files of checkpoints/: one for each role, or the error names them.

    Raises:
        CheckpointError: a damaged record, or several files of one role and no record.
    """
    from caramba.runs.stages import (  # a model in memory needs none
        STAGES,
        FinishedStage,
        read_finished_stages,
    )

    groups = sorted(place.glob("groups/*"), key=lambda folder: _group_order(place, folder.name))
    found: list[FinishedStage] = []
    for folder in (place, *groups):
        stages = read_finished_stages(folder)
        if not (folder / STAGES).is_dir():
            files = sorted((folder / "checkpoints").glob("*.safetensors"))
            stages = [FinishedStage(file.stem, str(read_metadata(file).get("role")), file) for file in files]
            roles = [stage.role for stage in stages if stage.role != "control"]
            if len(set(roles)) < len(roles):
                raise CheckpointError(
                    f"{folder}: has no record of its stages and several checkpoints, "
                    f"{', '.join(file.name for file in files)}; name the file to open"
                )
        found += [stage for stage in stages if stage.role != "control"]
    return found


def _check_recorded(stage: FinishedStage) -> Path:
    """Return the weights of a stage.

    Raises:
        CheckpointError: the file is missing, or its header names another format or role than the record.
    """
    file = stage.checkpoint
    if not file.is_file():
        raise CheckpointError(
            f"{file}: missing, and the run's record names it as the weights of stage {stage.id}; restore it, or name "
            "another checkpoint file"
        )
    metadata = read_metadata(file)
    found = (metadata.get("format"), metadata.get("role"))
    if found != (FORMAT, stage.role):
        raise CheckpointError(
            f"{file}: its header has format={found[0]!r} and role={found[1]!r}, expected {FORMAT!r} and "
            f"{stage.role!r} of stage {stage.id}; restore the file"
        )
    return file


def _group_order(place: Path, name: str) -> tuple[int, str]:
    """Return the place of a group among those of the run's manifest."""
    names = [group.name for group in read_manifest(place).groups] if (place / MANIFEST).is_file() else []
    return (names.index(name) if name in names else -1), name


def _check_shape(spec: ModelSpec, expected: ModelSpec | None, path: Path, where: str) -> None:
    if expected is not None and _shape(spec) != _shape(expected):
        raise CheckpointError(
            f"{where}: {path} holds another network than the manifest describes; "
            "remove the manifest's description of it, or name the checkpoint that belongs to it"
        )


def _shape(spec: ModelSpec) -> dict[str, object]:
    return {key: value for key, value in spec_of(spec).model_dump(mode="json").items() if key != "name"}
