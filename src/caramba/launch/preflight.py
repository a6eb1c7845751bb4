"""Are the weights that a run starts from at hand? Answered before anything is written, without a network."""

from __future__ import annotations

import os
import re
from pathlib import Path

from caramba.config.manifest import Manifest
from caramba.errors import CheckpointError, ConfigError
from caramba.runs import MANIFEST, resolve_run

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")
LATER = "reading Hugging Face weights comes with the model substrate work"


def check_weights(manifest: Manifest) -> Manifest:
    """Check every checkpoint that a manifest names and return the manifest with their absolute paths.

    Raises:
        CheckpointError: weights that are needed and are not here, with the ways on.
    """
    model = manifest.model
    update: dict[str, object] = {}
    if model.checkpoint is not None:
        update["checkpoint"] = str(find_checkpoint(model.checkpoint, "model.checkpoint"))
    teacher = model.teacher
    if teacher is not None and teacher.checkpoint is not None:
        path = find_checkpoint(teacher.checkpoint, "model.teacher.checkpoint")
        if teacher.manifest is None and path.is_file():
            raise CheckpointError(
                f"model.teacher.checkpoint={teacher.checkpoint}: a safetensors file does not describe its network; "
                "give the run directory that it is from, or add model.teacher.manifest"
            )
        update["teacher"] = teacher.model_copy(update={"checkpoint": str(path)})
    elif teacher is not None:
        _check_teacher_is_trained(manifest)
    _check_student_has_weights(manifest)
    return manifest.model_copy(update={"model": model.model_copy(update=update)}) if update else manifest


def _check_student_has_weights(manifest: Manifest) -> None:
    """A global phase goes on from weights: given, transplanted, or pretrained by an earlier run of its group."""
    if manifest.model.checkpoint is not None or manifest.model.teacher is not None:
        return
    for group in manifest.selected_groups():
        has_weights = False
        for run in group.runs:
            if run.train is not None and run.train.phase == "global" and not has_weights:
                raise CheckpointError(
                    f"run {run.id!r} goes on from weights, and the model has none. Ways on:\n"
                    "  1. model.checkpoint=RUN, a run that trained this model, or a .safetensors file\n"
                    "  2. train=pretrain, which starts from random weights\n"
                    "  3. model=tiny_dba train=upcycle, which trains a teacher and distils a student from it"
                )
            has_weights = has_weights or run.train is not None


def _check_teacher_is_trained(manifest: Manifest) -> None:
    """Without a checkpoint, a run that trains the teacher comes before any that needs its weights."""
    for group in manifest.selected_groups():
        is_trained = False  # a group starts from models of its own
        for run in group.runs:
            phase = run.train
            if phase is not None and phase.trains == "teacher" and not phase.control:
                is_trained = True
            elif not is_trained and (
                run.verify or (phase is not None and (phase.control or phase.phase != "pretrain"))
            ):
                raise CheckpointError(
                    f"run {run.id!r} needs the teacher's weights, and model.teacher has no checkpoint. Ways on:\n"
                    "  1. train=upcycle, which pretrains the teacher first\n"
                    "  2. model.teacher.checkpoint=RUN, a run that trained one (see runs/), or a .safetensors file\n"
                    "  3. train=pretrain, which trains this model without its teacher"
                )


def find_checkpoint(text: str, key: str) -> Path:
    """Return the run directory or safetensors file that `text` names.

    Raises:
        CheckpointError: it is not here, or is of a kind that cannot be read yet.
    """
    path = Path(text).expanduser()
    if path.suffix == ".safetensors":
        if not path.is_file():
            raise CheckpointError(f"{key}={text}: no such file")
        return path.absolute()
    if path.is_dir() and (path / "config.json").is_file() and not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{key}={text}: this is a Hugging Face folder, and {LATER}. Ways on:\n{_ways(None)}"
        )
    if path.exists() or not HUB_ID.match(text) or text.startswith("runs/"):
        return _run_with_weights(text, key)
    try:
        return _run_with_weights(text, key)
    except CheckpointError:
        if (Path("runs") / text).exists():
            raise
    cached = hub_folder(text)
    if cached is not None:
        raise CheckpointError(f"{key}={text}: found at {cached}, and {LATER}. Ways on:\n{_ways(None)}")
    raise CheckpointError(
        f"{key}={text}: not in this machine's Hugging Face cache ({hub_cache()}), and no run or file of that name. "
        f"Ways on:\n{_ways(text)}"
    )


def _run_with_weights(text: str, key: str) -> Path:
    try:
        run = resolve_run(text)
    except ConfigError as error:
        raise CheckpointError(f"{key}={error}") from None
    folders = [run / "checkpoints", *run.glob("groups/*/checkpoints")]
    if not any(any(folder.glob("*.safetensors")) for folder in folders):
        raise CheckpointError(
            f"{key}={text}: the run {run} has no finished checkpoint (checkpoints/*.safetensors); "
            f"finish it with `caramba resume {run}`, or name another"
        )
    return run


def hub_cache() -> Path:
    """Return the folder where the hub's client keeps downloads."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"
    return Path(home).expanduser() / "hub"


def hub_folder(hub_id: str) -> Path | None:
    """Return the newest local snapshot of a hub id that holds weights, or None."""
    snapshots = hub_cache() / f"models--{hub_id.replace('/', '--')}" / "snapshots"
    found = [folder for folder in snapshots.glob("*") if any(folder.glob("*.safetensors"))]
    return max(found, key=lambda folder: folder.stat().st_mtime) if found else None


def _ways(hub_id: str | None) -> str:
    first = (
        f"hf auth login, then hf download {hub_id}"
        if hub_id
        else "wait for it, or convert the weights to a run of caramba"
    )
    note = f" (gated models need an accepted licence; {LATER})" if hub_id else ""
    return (
        f"  1. {first}{note}\n"
        "  2. model.teacher.checkpoint=DIR, a run that trained this teacher, or its .safetensors file\n"
        "  3. model=tiny_dba train=upcycle, which trains its own teacher here in minutes"
    )
