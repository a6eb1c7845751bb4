"""Checks of a manifest that need neither torch nor a device: weights, data, libraries and the phases' settings.

`caramba compile` and `caramba launch` run the same checks, before anything is written. A launch also downloads here the
weights that a hub id names.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from caramba.config.benchmark import AccuracyBenchmarkConfig
from caramba.config.crosscheck import cross_check
from caramba.config.hf import is_hf_folder, read_hf_config, spec_of_folder
from caramba.config.manifest import Manifest
from caramba.config.optional_deps import need_harness, need_library
from caramba.config.parallel import LauncherConfig
from caramba.config.suite_file import read_suite
from caramba.config.topology import attention_configs
from caramba.config.train import BLOCK_PHASES, check_batch_is_given, check_block_steps, check_cpu_precision
from caramba.data.checkpoint.folder import weight_files
from caramba.data.checkpoint.header import read_metadata
from caramba.data.checkpoint.hub import HUB_ID, cached_folder, hub_cache, hub_folder
from caramba.data.checkpoint.locate import FORMAT, LOADED
from caramba.data.checkpoint.locate import find_checkpoint as find_weights
from caramba.data.checkpoint.network import check_stored_network
from caramba.errors import CheckpointError, ConfigError, nearest
from caramba.runs import MANIFEST, resolve_run
from caramba.runs.shell import show_path

if TYPE_CHECKING:
    from caramba.launch.freeze import Frozen

PLANS = ("auto", "refresh", "off")
_PATH_HINT = "give a Hugging Face folder, or a hub id such as HuggingFaceTB/SmolLM-135M"


def check_startable(frozen: Frozen, *, is_plan: bool = False) -> tuple[Manifest, list[str]]:
    """Check all that a run needs and that can be answered without torch and without a device.

    Args:
        frozen: the composed manifest.
        is_plan: whether it is only planned. A plan downloads nothing, and may lack data that nobody chose.

    Returns:
        The manifest with absolute paths of its weights, and notes: what a launch needs that its plan does without, and
        CPU threads that exceed the cores.

    Raises:
        ConfigError: a setting that contradicts another, or asks for what is not here.
        CheckpointError: weights that are not here.
        DataError: data that is missing, damaged, or does not fit the model.
    """
    notes = [] if not is_plan else _downloads(frozen.manifest)
    manifest = check_weights(frozen.manifest, downloads=not is_plan)
    try:
        frozen.check_vocabulary()
    except ConfigError as error:
        if frozen.is_data_chosen or not is_plan:
            raise
        notes.append(f"a launch needs data for this model: {error}")
    else:
        from caramba.data.corpus import check_text

        check_text(manifest)
    check_phases(manifest)
    check_extras(manifest)
    if (threads := note_on_threads(manifest)) is not None:
        notes.append(threads)
    return manifest, notes


def check_phases(manifest: Manifest) -> None:
    """Check the settings of every phase that a worker would refuse, without asking a device.

    Raises:
        ConfigError: naming the setting and the fix.
    """
    n_blocks = len(attention_configs(manifest.model.topology))
    for group in manifest.groups_to_run():
        for run, phase in group.trained:
            if (phase.device or manifest.device) == "cpu":
                check_cpu_precision(phase)
            if manifest.plan == "off":
                check_batch_is_given(run.id, phase)
            is_split = manifest.parallel.blockwise == "blocks"  # each rank trains its own blocks
            if phase.phase in BLOCK_PHASES and phase.schedule == "sequential" and not is_split:
                check_block_steps(n_blocks, phase.steps)


def check_weights(manifest: Manifest, *, downloads: bool = True) -> Manifest:
    """Check every checkpoint that a manifest names and return the manifest with their absolute paths.

    A hub id becomes the folder of its snapshot, downloaded when it is not in the cache; without `downloads` it is left
    as it is. A teacher of a Hugging Face folder that the manifest does not describe is described here.

    Raises:
        CheckpointError: weights that are missing; the message lists what to do.
        ConfigError: the teacher that its folder describes does not go with the model.
    """
    model = manifest.model
    absent = set[str]() if downloads else _absent_hub_ids(manifest)
    update: dict[str, object] = {}
    for key, text in (("path", model.path), ("checkpoint", model.checkpoint)):
        if text is not None and text not in absent:
            update[key] = str(find_checkpoint(text, f"model.{key}"))
    teacher = model.teacher
    if teacher is not None and teacher.checkpoint is not None and teacher.checkpoint not in absent:
        path = find_checkpoint(teacher.checkpoint, "model.teacher.checkpoint")
        described = teacher.manifest
        if described is None and is_hf_folder(path) and not (path / MANIFEST).is_file():
            described = spec_of_folder(path)
        elif described is None and path.is_file() and read_metadata(path).get("format") != FORMAT:
            raise CheckpointError(
                f"model.teacher.checkpoint={teacher.checkpoint}: this safetensors file does not describe its network; "
                "give the folder or run directory that it is from, or add model.teacher.manifest"
            )
        update["teacher"] = teacher.model_copy(update={"checkpoint": str(path), "manifest": described})
    elif teacher is not None and teacher.checkpoint is None:
        _check_teacher_is_trained(manifest)
    _check_student_has_weights(manifest)
    if not update:
        return manifest
    checked = manifest.model_copy(update={"model": model.model_copy(update=update)})
    cross_check(checked)
    _check_networks(checked, update)
    return checked


def _check_networks(manifest: Manifest, found: Collection[str]) -> None:
    """Check that the weights of `found`, keys of `model`, are of the networks that the manifest describes."""
    model = manifest.model
    if "path" in found and model.path is not None:
        check_stored_network(Path(model.path), model, "model.path")
    elif "checkpoint" in found and model.checkpoint is not None:
        place = find_weights(Path(model.checkpoint), role="student")
        check_stored_network(place, model, "model.checkpoint")
    teacher = model.teacher
    if "teacher" in found and teacher is not None and teacher.manifest is not None and teacher.checkpoint:
        place = find_weights(Path(teacher.checkpoint), role="teacher")
        check_stored_network(place, teacher.manifest, "model.teacher.checkpoint")


def _absent_hub_ids(manifest: Manifest) -> set[str]:
    """Return the hub ids that a manifest names and that a launch would download."""
    model = manifest.model
    named = (model.path, model.checkpoint, model.teacher.checkpoint if model.teacher is not None else None)
    ids = {text for text in named if text is not None and HUB_ID.match(text) and not text.startswith("runs/")}
    return {
        text for text in ids if not any(map(Path.exists, (Path(text), Path("runs") / text))) and not cached_folder(text)
    }


def _downloads(manifest: Manifest) -> list[str]:
    return [f"a launch downloads {text} from the hub" for text in sorted(_absent_hub_ids(manifest))]


def check_extras(manifest: Manifest) -> None:
    """Check that what a manifest needs besides its model is here: the file of its plan, the libraries of its
    instruments, the programs, model, key and price of its paper, and the extra and folders of its accuracy benchmarks.

    Raises:
        ConfigError: naming the setting or the benchmark, and the extra, file or folder.
    """
    if manifest.plan not in PLANS and not Path(manifest.plan).is_file():
        raise ConfigError(
            f"plan={manifest.plan}: no such file; give a plan.json, or {', '.join(PLANS[:-1])} or {PLANS[-1]}"
            f"{nearest(manifest.plan, PLANS)}"
        )
    if manifest.logger.hdf5:
        need_library("h5py", "hdf5", "logger.hdf5=true")
    if manifest.logger.wandb:
        need_library("wandb", "wandb", "logger.wandb=true")
    if manifest.settings.console == "plot":
        need_library("plotext", "plot", "settings.instrument=plot")
    if manifest.paper is not None and manifest.paper.enabled:
        from caramba.paper.client import LanguageModel
        from caramba.paper.compile import need_latex
        from caramba.paper.literature import read_bibliography

        need_latex("paper")
        LanguageModel(manifest.paper).price()
        if manifest.paper.citations.bibliography is not None:
            read_bibliography(Path(manifest.paper.citations.bibliography).expanduser())
    for group in manifest.groups_to_run():
        for bench in group.benchmarks:
            if isinstance(bench.config, AccuracyBenchmarkConfig):
                where, folder = f"benchmarks.{bench.id} (accuracy)", bench.config.include_path
                for suite in bench.config.suites:
                    read_suite(suite, where=where, allow_code=bench.config.allow_code)
                if bench.config.eval_data is not None or bench.config.suites:
                    continue  # the tasks are read with the tokenizer, before training
                need_harness(where)
                if folder is not None and not Path(folder).is_dir():
                    raise ConfigError(f"{where}: include_path={folder} is not a folder; name one with task YAML files")


def _check_student_has_weights(manifest: Manifest) -> None:
    """Check that a global phase starts from weights: given, transplanted, or trained by an earlier run of its group."""
    model = manifest.model
    if model.checkpoint is not None or model.path is not None or model.teacher is not None:
        return
    for group in manifest.groups_to_run():
        has_weights = False
        for run, phase in group.trained:
            if phase.phase == "global" and not has_weights:
                raise CheckpointError(
                    f"run {run.id!r} starts from weights, and the model has none. Choose one:\n"
                    "  1. model.checkpoint=RUN, a run that trained this model, or a .safetensors file\n"
                    "  2. train=pretrain, which starts from random weights\n"
                    "  3. model=tiny_dba train=upcycle, which trains a teacher and distils a student from it"
                )
            has_weights = has_weights or run.exp is None


def _check_teacher_is_trained(manifest: Manifest) -> None:
    """Without a checkpoint, a run that trains the teacher comes before any that needs its weights."""
    for group in manifest.groups_to_run():
        is_trained = False  # a group starts from models of its own
        for run in group.runs:
            phase = run.train
            if phase is not None and phase.trains == "teacher" and not phase.control:
                is_trained = True
            elif not is_trained and (
                run.verify or (phase is not None and (phase.control or phase.phase != "pretrain"))
            ):
                raise CheckpointError(
                    f"run {run.id!r} needs the teacher's weights, and model.teacher has no checkpoint. Choose one:\n"
                    "  1. train=upcycle, which pretrains the teacher first\n"
                    "  2. model.teacher.checkpoint=RUN, a run that trained one (see runs/), or a .safetensors file\n"
                    "  3. train=pretrain, which trains this model without its teacher"
                )


def find_checkpoint(text: str, key: str) -> Path:
    """Return the run directory, safetensors file or Hugging Face folder that `text` names; a hub id is downloaded.

    Raises:
        CheckpointError: it is not here and cannot be had, is incomplete, or is not of the kind that `key` takes.
    """
    path = Path(text).expanduser()
    if path.suffix == ".safetensors" and key != "model.path":
        if not path.is_file():
            raise CheckpointError(f"{key}={text}: no such file")
        return path.absolute()
    is_run = (path / MANIFEST).is_file()
    if path.is_dir() and not is_run and (key == "model.path" or is_hf_folder(path) or _holds_weights(path)):
        read_hf_config(path)
        weight_files(path)
        return path.absolute()
    is_local = path.exists() or not HUB_ID.match(text) or text.startswith("runs/")
    if key == "model.path":
        if is_local:
            raise CheckpointError(f"{key}={text}: no such folder; {_PATH_HINT}")
        return from_hub(text, key)
    if is_local:
        return _run_with_weights(text, key)
    try:
        return _run_with_weights(text, key)
    except CheckpointError:
        if (Path("runs") / text).exists():
            raise
    return from_hub(text, key)


def from_hub(hub_id: str, key: str, *, needs_weights: bool = True) -> Path:
    """Return the local snapshot of a hub id, downloaded when it is not in the cache.

    Raises:
        CheckpointError: it cannot be downloaded; the message lists what to do.
    """
    try:
        return hub_folder(hub_id, needs_weights=needs_weights)
    except CheckpointError as error:
        also = "" if key == "model.path" else ", and no run or file of that name"
        raise CheckpointError(
            f"{key}={hub_id}: not in this machine's Hugging Face cache ({hub_cache()}){also}; {error}. "
            f"Choose one:\n{_fixes(hub_id, key)}"
        ) from None


def _holds_weights(path: Path) -> bool:
    return any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json"))


def _run_with_weights(text: str, key: str) -> Path:
    try:
        run = resolve_run(text)
    except ConfigError as error:
        raise CheckpointError(f"{key}={error}; a Hugging Face folder or a .safetensors file will do too") from None
    folders = [run / "checkpoints", *run.glob("groups/*/checkpoints")]
    if not any(any(folder.glob("*.safetensors")) or (folder / LOADED).is_file() for folder in folders):
        raise CheckpointError(
            f"{key}={text}: the run {run} has no finished checkpoint (checkpoints/*.safetensors); "
            f"finish it with `caramba resume {show_path(run)}`, or name another"
        )
    return run


def _fixes(hub_id: str, key: str) -> str:
    local = f"{key}=DIR, a Hugging Face folder with config.json and its .safetensors files"
    if key != "model.path":
        local += ", or a run that trained this model, or its .safetensors file"
    return (
        f"  1. hf auth login, then hf download {hub_id} (gated models need an accepted licence)\n"
        f"  2. {local}\n"
        "  3. model=tiny_dba train=upcycle, which trains its own teacher here in minutes"
    )


QUOTA = Path("/sys/fs/cgroup/cpu.max")


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_each(workers: int, launcher: LauncherConfig, environment: Mapping[str, str]) -> int:
    """Return the CPU threads of each worker: `launcher.threads`, else an equal share of the cores.

    A lower OMP_NUM_THREADS holds for workers too, as torchrun keeps it.
    """
    share = max(1, available_cores() // workers)
    asked = environment.get("OMP_NUM_THREADS", "")
    return launcher.threads or (min(share, int(asked) or share) if asked.isdecimal() else share)


def usable_cores(quota: Path = QUOTA) -> int:
    """Return the cores that this process may use: those it is bound to, and no more than a container's quota."""
    cores = available_cores()
    try:
        limit, period = quota.read_text(encoding="ascii").split()[:2]
        return cores if limit == "max" else min(cores, max(1, math.ceil(int(limit) / int(period))))
    except (OSError, ValueError):  # no cgroup of version 2, so no quota that could be read
        return cores


def note_on_threads(manifest: Manifest, environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a note when the workers of a run together have more threads than cores, None otherwise.

    Workers of a SLURM job run on other machines, and are not judged here.
    """
    launcher = manifest.launcher
    if launcher.is_slurm:
        return None
    cores, asked = usable_cores(), environment.get("OMP_NUM_THREADS", "")
    workers = 1
    if launcher.type == "torchrun":
        spread = manifest.parallel
        shared = spread.dp if isinstance(spread.dp, int) else 1
        workers = launcher.nproc_per_node or shared * spread.tp * spread.pp
    elif launcher.type == "process":
        workers = launcher.n_jobs or 1
    if workers > 1 or launcher.type != "inline":
        threads = threads_each(workers, launcher, environment)
        key = "launcher.threads"
    else:
        threads = int(asked) if asked.isdecimal() and int(asked) else available_cores()
        key = "OMP_NUM_THREADS"
    if workers * threads <= cores:
        return None
    each = f"{workers} workers with {threads} threads each" if workers > 1 else f"{threads} threads"
    return f"{each} on {cores} usable cores are slower than one a core; set {key}={max(1, cores // workers)}"
