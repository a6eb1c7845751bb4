"""fit(): one phase of training through Lightning, resumable at every saved step."""

from __future__ import annotations

import logging
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from torch.utils.data import Subset

from caramba.config.manifest import LoggerConfig, Manifest, SettingsConfig
from caramba.config.topology import memory_window
from caramba.config.train import PhaseConfig
from caramba.config.trainer import TrainerConfig
from caramba.console import logger
from caramba.data import TokenDataset, count_targets
from caramba.data.checkpoint import load_training_state, save_training_state
from caramba.data.checkpoint.folder import LOOP, latest_sharded_state
from caramba.distill import Batch, BlockwiseObjective, Objective
from caramba.errors import OutOfMemory, Preempted, one_line
from caramba.optim import NonFiniteWatch
from caramba.runs.events import MEMORY_SLOTS, append_event, drop_metrics_after, metric_rows, start_phase
from caramba.runs.exit_codes import listen, stop_error, until_step_ends
from caramba.runtime import RuntimePlan, data_share, get_world_size, is_main_process, is_out_of_memory
from caramba.train.callbacks import (
    Checkpointing,
    Compilation,
    CompiledGradients,
    Float8Products,
    GradientAveraging,
    HeldOutStopping,
    KeptWeights,
    Lowering,
    Monitoring,
    Profiling,
    RuntimePlanning,
    TimeLimit,
    stopping_callbacks,
)
from caramba.train.data import mean_targets, targets_per_window, train_loader, validation_loader, windows_at
from caramba.train.display import Display
from caramba.train.loggers.events import EventLogger
from caramba.train.module import CarambaModule
from caramba.train.strategies import (
    AVERAGED,
    SHARDED,
    matmul_precision,
    precision_arguments,
    strategy_arguments,
    strategy_for,
)
from caramba.train.throughput import PeakMemory, PhaseMeter, Work, device_peak


def build_profiler(name: str | None, folder: Path) -> Profiler | None:
    """Return Lightning's profiler of a name, `simple`, `advanced` or `pytorch`, which writes to `folder`."""
    if name is None or not is_main_process():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if name == "simple":
        return SimpleProfiler(dirpath=folder, filename="simple")
    if name == "advanced":
        return AdvancedProfiler(dirpath=folder, filename="advanced")
    return PyTorchProfiler(dirpath=folder, filename="pytorch")


@dataclass(frozen=True)
class FitOutcome:
    """What a phase's training ended with; `resumed_from` is the step at which this process took over.

    `reason` is why it ended before its last step, empty where it did not. `tokens` are the targets that were trained
    on, padding left out; `seconds` are those of every process that trained
    the phase, with steps that a kill made it repeat; `measured` is what the monitors saw of the phase:
    tokens_per_s, data_wait_share, mfu where the device's peak is known, and peaks of memory in bytes.
    """

    steps: int
    tokens: int
    seconds: float
    loss: float
    resumed_from: int
    measured: dict[str, float]
    held_out: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class PhaseData:
    """The windows of a phase, and where in the endless global stream of samples it begins."""

    train: TokenDataset | Subset[Batch]
    val: TokenDataset
    seed: int
    start: int


def fit(
    objective: Objective,
    phase: PhaseConfig,
    data: PhaseData,
    plan: RuntimePlan,
    *,
    manifest: Manifest,
    run_dir: Path,
    save_final: Callable[[], None],
    flops_per_token: float | None = None,
    shard: Callable[[], None] | None = None,
    callbacks: Sequence[Callback] = (),
    save_kept: Callable[[str], None] = lambda name: None,
    work_after: float = 0.0,
) -> FitOutcome:
    """Train `objective` for `phase.steps` optimiser steps or until it has converged, from the last saved state if any.

    Args:
        save_final: writes the phase's final weights; called on every rank as soon as the last step is done.
        shard: spreads the weights of the objective's model over the ranks, for parallel=fsdp2.
        flops_per_token: of a position that trains, forward and backward; there is no MFU without it.
        callbacks: what else happens and when; see `caramba.train.callbacks`.
        save_kept: writes the weights as `checkpoints/kept/NAME.safetensors`, for `trainer.save_top_k` and others.
        work_after: what trains after this phase, as a multiple of its own work, for the time that is left.

    Raises:
        KeyboardInterrupt: the user stopped the run; the state of the last step is on disk, and after a second Ctrl-C
            the last one saved before it.
        Preempted: another signal stopped the run; the state of the last step is on disk.
        OutOfMemory: a step did not fit; the last saved state is on disk.
    """
    _quiet_lightning()
    parallel = manifest.parallel
    way = strategy_for(parallel, phase)
    share = data_share(parallel.ranks_per_batch)
    state = state_path(run_dir, plan.phase)
    position = read_saved_step(state)
    earlier_s = start_phase(run_dir, plan.phase, position) if is_main_process() else 0.0
    assert isinstance(phase.batch_size, int)
    per_step = phase.batch_size * phase.gradient_accumulation_steps * share[1]

    def windows_of(step: int) -> list[int]:
        return windows_at(data.train, seed=data.seed, start=data.start + step * per_step, samples=per_step)

    watch = NonFiniteWatch(phase, run_dir, plan.phase, windows_of, writes=is_main_process())
    targets = targets_per_window(data.train)
    targets_of = None
    if not isinstance(objective, BlockwiseObjective):  # whose losses are relative, block by block
        batches = phase.gradient_accumulation_steps * share[1]
        targets_of = mean_targets(targets, seed=data.seed, start=data.start, samples=per_step, batches=batches)
    module = CarambaModule(
        objective,
        phase,
        watch,
        log_every=manifest.trainer.log_every_n_steps,
        way=way,
        shard=shard,
        targets_of=targets_of,
    )
    if (mode := plan.value("activation_checkpointing")) != "none":
        objective.checkpoint(mode, phase.activation_checkpoint_granularity)
    precision, precision_plugins = precision_arguments(plan)
    tokens_per_step = round(per_step * float(targets.mean())) if targets.size else 0
    device = torch.device(plan.value("device"))
    pin = phase.pin_memory is not False and device.type == "cuda"  # elsewhere there is nothing to pin for
    loader = train_loader(
        data.train, phase, seed=data.seed, start=data.start + position * per_step, pin=pin, share=share
    )
    places, who = strategy_arguments(parallel, way, device)
    work = Work(tokens_per_step, flops_per_token and flops_per_token * per_step * phase.block_size)
    meter, memory = PhaseMeter(work, waited=lambda: loader.waited_s), PeakMemory(device)
    display = None
    if is_main_process() and not logger.quiet:
        display = Display(plan.phase, phase.steps, manifest.settings.console, work_after=work_after)
    profiling = manifest.debug.name == "profile"
    orchestration: list[Any] = []
    if phase.orchestrator_enabled:
        from caramba.train.orchestration.build import build_orchestration

        orchestration.append(
            build_orchestration(
                phase,
                plan.phase,
                data,
                objective,
                run_dir=run_dir,
                per_step=per_step,
                share=share,
                device=device,
            )
        )
    has_end = manifest.trainer.early_stopping is not None or manifest.trainer.max_time is not None
    stopping = stopping_callbacks(manifest.trainer) if has_end else []
    kept = _kept_weights(manifest.trainer, phase, run_dir, plan.phase, save_kept)

    def save_last() -> None:
        for one in kept:
            if is_main_process() and (step := one.restore(module)) is not None:
                logger.info(f"{plan.phase}: final weights are those of step {step:,}, the lowest held-out loss")
        save_final()

    trainer = pl.Trainer(
        accelerator=device.type,
        **places,
        precision=precision,
        max_steps=phase.steps,
        max_epochs=-1,
        logger=_build_loggers(manifest.logger, manifest.settings, run_dir, plan.phase, position)
        if is_main_process()
        else False,
        callbacks=[
            Monitoring(
                meter,
                memory,
                display,
                phase.steps,
                lambda: _peak_of_all(device, plan, manifest.settings.peak_tflops),
            ),
            # After the rows of a step are recorded: a run that resumes from the state lacks none.
            *callbacks,
            *_slot_statistics(objective, phase, way, run_dir, plan.phase),
            *_own_callbacks(manifest, state),
            *stopping,
            *kept,
            *orchestration,
            Checkpointing(state, phase.save_every, save_last, phase.eval_every),
            RuntimePlanning(plan, run_dir, tokens_per_step),
            *_float8(
                objective, phase, run_dir, plan.value("compile_model") is not False
            ),  # before anything is compiled
            Lowering(objective, plan, run_dir),
            *_compilation(objective, plan.value("compile_model")),
            *([GradientAveraging(parallel, phase)] if way == AVERAGED and not module.shares_blocks else []),
            *([Profiling(run_dir / "profile" / plan.phase, plan.phase)] if profiling else []),
        ],
        plugins=[*([] if way == SHARDED else [WholeCheckpointIO()]), *precision_plugins, *who],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=way != SHARDED,  # what FSDP2 gathers in a validation, it keeps for the next step
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=None,
        val_check_interval=phase.eval_every * phase.gradient_accumulation_steps if phase.eval_every else None,
        limit_val_batches=manifest.trainer.limit_val_batches if phase.eval_every else 0,
        profiler=build_profiler(manifest.trainer.profiler, run_dir / "profile" / plan.phase),
        detect_anomaly=manifest.trainer.detect_anomaly,
    )
    # Lightning would take SIGTERM over: it ends in SystemExit, and its handler waits for the other ranks.
    trainer._signal_connector.register_signal_handlers = listen
    if position:
        logger.info(f"{plan.phase}: resuming from step {position:,} of {phase.steps:,}")
    # Ranks agree on a stop while a step runs (`Agreement`). Lightning asks by a broadcast, and waits for the device,
    # before every batch, so that no launch of a step is made before the step ahead has ended.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    began = time.perf_counter()
    failure: OutOfMemory | None = None
    try:
        with until_step_ends(), matmul_precision(plan):
            trainer.fit(
                module,
                train_dataloaders=loader,
                val_dataloaders=validation_loader(data.val, phase) if phase.eval_every else None,
                ckpt_path=str(state) if has_saved_state(state) else None,
                weights_only=True,
            )
    except SystemExit as stop:  # Lightning turns Ctrl-C into sys.exit(1)
        raise KeyboardInterrupt from stop
    except Preempted as stop:
        raise stop_error(signal.Signals[stop.signal_name]) from None
    except (RuntimeError, MemoryError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        failure = _out_of_memory(error, phase, module)
    finally:
        objective.checkpoint("none")
    if failure is not None:  # raised here, where nothing holds the frames of the step and their tensors any more
        raise failure
    steps = trainer.global_step
    tokens = count_targets(targets, data.seed, data.start, steps * per_step)
    seconds = earlier_s + time.perf_counter() - began
    measured = {**meter.summary(), **memory.peaks}
    for one in orchestration:
        measured |= one.orchestrator.cost(per_step * phase.block_size)
    reason = "" if steps >= phase.steps else _reason(module, stopping)
    loss = module.running_loss()
    return FitOutcome(steps, tokens, seconds, loss, position, measured, module.held_out, reason)


def _reason(module: CarambaModule, stopping: Sequence[HeldOutStopping | TimeLimit]) -> str:
    if module.has_converged:
        return "every block has converged"
    return next((one.reason for one in stopping if one.reason), "a callback stopped it")


def _kept_weights(
    config: TrainerConfig, phase: PhaseConfig, run_dir: Path, name: str, save: Callable[[str], None]
) -> list[KeptWeights]:
    if not config.keeps_weights:
        return []
    return [KeptWeights(config, phase.save_every, run_dir / "checkpoints" / "kept", name, save)]


def _slot_statistics(objective: Objective, phase: PhaseConfig, way: str, run_dir: Path, name: str) -> list[Callback]:
    """Return the statistics of a model with memory slots; weights that ranks share have none."""
    window = memory_window(objective.model.spec.topology)
    if window is None or way == SHARDED or phase.block_size <= window:
        return []
    from caramba.train.callbacks.monitoring import SlotStatistics  # of few models

    def write(step: int, read_mass: dict[str, list[list[float]]]) -> None:
        append_event(run_dir, MEMORY_SLOTS, phase=name, step=step, read_mass=read_mass)

    return [SlotStatistics(objective.model, write)]


def _own_callbacks(manifest: Manifest, state: Path) -> list[Callback]:
    if not manifest.callbacks:
        return []
    from caramba.train.extensions import build_callbacks

    return build_callbacks(manifest.callbacks, state)


def _float8(objective: Objective, phase: PhaseConfig, run_dir: Path, is_compiled: bool) -> list[Callback]:
    if phase.float8 == "none":
        return []
    least = phase.float8_min_width
    return [Float8Products(objective.model, phase.float8, least, run_dir, is_compiled=is_compiled)]


def _compilation(objective: Objective, mode: bool | str) -> list[Callback]:
    if mode is False:
        return []
    modules = objective.compilable()
    # A blockwise objective's schedule decides which blocks train at a step.
    checks = [] if isinstance(objective, BlockwiseObjective) else [CompiledGradients(modules)]
    return [Compilation(modules, "default" if mode is True else str(mode)), *checks]


def _out_of_memory(error: BaseException, phase: PhaseConfig, module: CarambaModule) -> OutOfMemory:
    """Return what to raise; gradients, which are of no more use, are let go."""
    for parameter in module.model.parameters():
        parameter.grad = None
    said = one_line(error)[:200]
    return OutOfMemory(
        f"{phase.phase}: out of memory at step {module.trained_steps} with batch_size={phase.batch_size}: {said}",
        step=module.trained_steps,
        # Weights in bfloat16 have lost what a new start would make masters from.
        is_clean=module.trained_steps == 0 and not module.is_stepping and not phase.has_16_bit_weights,
    )


def state_path(run_dir: Path, phase: str) -> Path:
    """Return where the resumable state of a phase is while it trains: a file, or a folder where each rank writes its
    part."""
    return run_dir / "checkpoints" / f"{phase}.state.pt"


def has_saved_state(state: Path) -> bool:
    """True if a phase can resume from its state: a folder may contain no complete checkpoint."""
    return state.is_file() or (state.is_dir() and latest_sharded_state(state) is not None)


def read_saved_step(state: Path) -> int:
    """Return the optimiser step of a saved training state, a file or a folder, 0 without one."""
    if not has_saved_state(state):
        return 0
    place = latest_sharded_state(state)
    return int(load_training_state(state if place is None else place / LOOP)["global_step"])


def drop_state(run_dir: Path, phase: str) -> None:
    """Remove the resumable state of a phase, which is of no more use once the phase is on record."""
    path = state_path(run_dir, phase)
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _peak_of_all(device: torch.device, plan: RuntimePlan, given: float | None) -> float | None:
    """Return the dense peak of all ranks' devices together, in FLOP/s."""
    peak = device_peak(device, plan.value("dtype"), given)
    return None if peak is None else peak * get_world_size()


def _quiet_lightning() -> None:
    # Lightning's notices (devices found, tips, worker counts) repeat what plan.json records, once per phase.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=PossibleUserWarning)
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.*")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")


def _build_loggers(
    config: LoggerConfig, settings: SettingsConfig, run_dir: Path, phase: str, step: int = 0
) -> list[Logger]:
    """Build the loggers of a phase that resumes after `step`: events and CSV always, the others as configured.

    An interrupted process may have recorded steps after the state that the phase resumes from. Those rows are dropped
    from events.jsonl, and TensorBoard and W&B begin again with the rows that stay, so that each stream has every step
    once, as do CSVLogger and loggers of plugins. Other loggers continue with the next row. metrics.h5 is made
    from events.jsonl with the next row.
    """
    if is_main_process():
        drop_metrics_after(run_dir, phase, step)
    streams: list[Logger] = []
    if config.tensorboard:
        if is_main_process():
            shutil.rmtree(run_dir / "tensorboard" / phase, ignore_errors=True)
        streams.append(TensorBoardLogger(save_dir=str(run_dir), name="tensorboard", version=phase))
    if config.wandb:
        from caramba.train.loggers.named import open_wandb

        streams.append(open_wandb(config, settings, run_dir, phase))
    named: list[Logger] = []
    if config.lightning:
        from caramba.train.loggers.named import build_named_loggers

        named, local = build_named_loggers(config.lightning, run_dir, phase)
        streams += local
        named = [logger for logger in named if logger not in local]
    if config.extra:
        from caramba.train.extensions import build_metric_loggers

        streams += build_metric_loggers(config.extra, run_dir, phase)
    for of, at, values in metric_rows(run_dir):
        if of == phase:
            for stream in streams:
                stream.log_metrics(values, step=at)
    if config.hdf5:
        from caramba.train.loggers.hdf5 import Hdf5Logger

        streams.insert(0, Hdf5Logger(run_dir, phase))
    return [EventLogger(run_dir, phase), *streams, *named]


class WholeCheckpointIO(CheckpointIO):
    """Saves through a temporary file, fsync and rename; loads with weights_only."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        save_training_state(Path(path), checkpoint)

    def load_checkpoint(
        self, path: Any, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load_training_state(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        Path(path).unlink(missing_ok=True)
