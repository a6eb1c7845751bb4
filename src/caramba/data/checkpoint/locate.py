"""Where the weights of a run, file or folder are. No torch."""

import json
from pathlib import Path

from caramba.config.hf import is_hf_folder
from caramba.data.checkpoint.folder import MODEL, is_dcp, latest_sharded_state, signature
from caramba.data.checkpoint.header import read_metadata
from caramba.errors import CheckpointError
from caramba.runs import MANIFEST, read_manifest
from caramba.runs.events import EVENTS, read_finished_phases
from caramba.runs.files import check_file, write_json
from caramba.runs.stages import STAGES, FinishedStage, read_finished_stages

LOADED = "loaded.json"
EXPORTED = ("model.safetensors", "model.ckpt")  # in a folder of `caramba export --format safetensors|ckpt`
FORMAT = "caramba-1"


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
        exported = [place / name for name in EXPORTED if (place / name).is_file()]
        if len(exported) > 1:
            raise CheckpointError(f"{place}: has {' and '.join(EXPORTED)}; name the file to open")
        if exported:
            return exported[0]
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
        CheckpointError: a damaged record, several files of one role and no record, or neither record nor weights of a
            phase that events.jsonl has as finished.
    """
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
        recorded = {stage.id for stage in stages}
        missing = [phase for phase in read_finished_phases(folder) if phase not in recorded]
        if missing:
            raise CheckpointError(
                f"{folder / STAGES}: has no record of phase {missing[0]}, which {EVENTS} has as finished; restore it, "
                "resume the run, or name a checkpoint file"
            )
        found += [stage for stage in stages if stage.role != "control"]
    return found


def _check_recorded(stage: FinishedStage) -> Path:
    """Return the weights of a stage.

    Raises:
        CheckpointError: the file is missing, or its header names another format role or phase than the record.
    """
    file = stage.checkpoint
    if not file.is_file():
        raise CheckpointError(
            f"{file}: missing, and the run's record names it as the weights of stage {stage.id}; restore it, or name "
            "another checkpoint file"
        )
    metadata = read_metadata(file)
    found = (metadata.get("format"), metadata.get("role"), metadata.get("phase", stage.id))
    if found != (FORMAT, stage.role, stage.id):
        raise CheckpointError(
            f"{file}: its header has format={found[0]!r}, role={found[1]!r} and phase={found[2]!r}, expected "
            f"{FORMAT!r}, {stage.role!r} and {stage.id!r}; restore the file"
        )
    return file


def _group_order(place: Path, name: str) -> tuple[int, str]:
    names = [group.name for group in read_manifest(place).groups] if (place / MANIFEST).is_file() else []
    return (names.index(name) if name in names else -1), name


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
        return {role: {key: str(entry[key]) for key in ("path", "signature")} for role, entry in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: cannot be read as the record of folders ({type(error).__name__}); restore it"
        ) from error
