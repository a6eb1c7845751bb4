"""Callbacks and loggers of plugins: built for a phase, and named when they fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import Logger

from caramba.config.extension import ExtensionConfig, build_extension, user_traceback
from caramba.errors import CarambaError, ExtensionFailedError
from caramba.runtime import get_world_size

LOGGER_METHODS = ("log_metrics", "log_hyperparams", "save", "finalize")


def build_callbacks(configs: Sequence[ExtensionConfig], state: Path) -> list[pl.Callback]:
    """Build the callbacks of a phase whose resumable state is `state`.

    One that raises ends the run with its name. After `on_train_batch_end` of a whole step the state of that step is
    saved first; after another hook the last saved state stays.
    """
    return [
        _guard_callback(build_extension(config, config), f"callbacks[{index}] ({config.type})", state)
        for index, config in enumerate(configs)
    ]


def build_metric_loggers(configs: Sequence[ExtensionConfig], run_dir: Path, phase: str) -> list[Logger]:
    """Build the loggers of plugins for a phase. One that raises ends the run with its name."""
    found: list[Logger] = []
    for index, config in enumerate(configs):
        logger = build_extension(config, config, run_dir, phase)
        for name in LOGGER_METHODS:
            where = f"logger.extra[{index}] ({config.type}): {name}"
            setattr(logger, name, partial(_call, getattr(logger, name), where))
        found.append(logger)
    return found


def _guard_callback(callback: pl.Callback, where: str, state: Path) -> pl.Callback:
    hooks = [name for name in vars(pl.Callback) if name.startswith("on_") or name in ("setup", "teardown")]
    for name in hooks:
        if getattr(type(callback), name) is not getattr(pl.Callback, name):
            setattr(callback, name, partial(_call_hook, getattr(callback, name), f"{where}: {name}", state))
    return callback


def _call(function: Callable[..., Any], where: str, *arguments: Any, **options: Any) -> Any:
    try:
        return function(*arguments, **options)
    except CarambaError:
        raise
    except Exception as error:
        raise ExtensionFailedError(f"{where} failed: {user_traceback(error)}; correct it, or remove it") from error


def _call_hook(
    hook: Callable[..., Any],
    where: str,
    state: Path,
    trainer: pl.Trainer,
    module: Any,
    *arguments: Any,
    **options: Any,
) -> Any:
    try:
        return hook(trainer, module, *arguments, **options)
    except CarambaError:
        raise
    except Exception as error:
        saved = _save(trainer, module, state) if where.endswith("on_train_batch_end") else None
        kept = f"the state of step {saved} is saved" if saved else "the last saved state stays"
        raise ExtensionFailedError(
            f"{where} failed at step {trainer.global_step}: {user_traceback(error)}; {kept}"
        ) from error


def _save(trainer: pl.Trainer, module: Any, state: Path) -> int | None:
    """Save the state after a whole step and return the step.

    None within a step, at the last one, and on several ranks, which would wait for this one.
    """
    step = trainer.global_step
    if module.micro_steps or not 0 < step < trainer.max_steps or get_world_size() > 1:
        return None
    module.refuse_divergence()
    module.prepare_save()
    trainer.save_checkpoint(state)
    return step
