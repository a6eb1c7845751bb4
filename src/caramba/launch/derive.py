"""Networks that a Hugging Face folder describes, put into the composed tree before it is validated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from caramba.checkpoint.hub import HUB_ID, cached_folder
from caramba.config.hf import CONFIG, DERIVED, describe_hf, hf_name, is_hf_folder, read_hf_config
from caramba.config.plain import is_mapping
from caramba.config.source import Source, placed
from caramba.errors import CheckpointError, ConfigError
from caramba.launch.preflight import from_hub
from caramba.runs import MANIFEST


def derive_models(tree: dict[str, Any], source: Source | None) -> dict[str, Any]:
    """Return `tree` with embedder, topology and head of `model.path`, and the manifest of a teacher's folder.

    A teacher is described here when its folder or snapshot is on this machine; a hub id that is not waits for the
    launch, so that a plan uses no network. `model.path` needs its config.json at once, and a hub id fetches that alone.

    Raises:
        ConfigError: `model.path` beside keys that follow from it.
        CheckpointError: the folder is missing, damaged or of an architecture that is not read.
    """
    model = tree.get("model")
    if not is_mapping(model):
        return tree
    model = dict(model)
    if isinstance(model.get("path"), str):
        for key in DERIVED:
            if key in model:
                raise ConfigError(
                    f"model.{key}: follows from {CONFIG} of model.path={model['path']} and cannot be set beside it"
                    f"{placed(('model', key), source)}; remove it (with model=hf nothing else describes the network)"
                )
        folder = _path_folder(model["path"])
        model |= _described(folder)
        model["name"] = model.get("name") or hf_name(folder)
    teacher = model.get("teacher")
    if is_mapping(teacher) and isinstance(teacher.get("checkpoint"), str) and teacher.get("manifest") is None:
        found = _teacher_folder(teacher["checkpoint"])
        if found is not None:
            model["teacher"] = {**teacher, "manifest": {"name": hf_name(found), **_described(found)}}
    return {**tree, "model": model}


def _described(folder: Path) -> dict[str, Any]:
    return describe_hf(read_hf_config(folder), str(folder / CONFIG))


def _path_folder(text: str) -> Path:
    path = Path(text).expanduser()
    if path.is_dir():
        if (path / MANIFEST).is_file() and not is_hf_folder(path):
            raise CheckpointError(
                f"model.path={text}: this is a run; go on from it with the model that it trained and "
                f"model.checkpoint={text}"
            )
        return path
    if path.exists() or not HUB_ID.match(text):
        raise CheckpointError(
            f"model.path={text}: no such folder; give a Hugging Face folder, or a hub id such as "
            "HuggingFaceTB/SmolLM-135M"
        )
    return from_hub(text, "model.path", needs_weights=False)


def _teacher_folder(text: str) -> Path | None:
    path = Path(text).expanduser()
    if path.is_dir() and is_hf_folder(path) and not (path / MANIFEST).is_file():
        return path
    is_hub_id = HUB_ID.match(text) and not path.exists() and not text.startswith("runs/")
    return cached_folder(text) if is_hub_id else None
