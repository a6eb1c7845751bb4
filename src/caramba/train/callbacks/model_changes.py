"""What changes in a model while a phase trains, and is put back: lowering, compilation, float8, averaged gradients."""

from __future__ import annotations

import dataclasses
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import nn
from torch._dynamo import config as dynamo_config

from caramba.config.parallel import ParallelConfig
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.console import logger
from caramba.distill import Objective
from caramba.errors import CarambaError, ConfigError
from caramba.lower.float8 import TILE, Float8Linear, Float8Recipe, RecipeName
from caramba.lower.fuse_linears import FUSIBLE
from caramba.lower.fuse_training import FAST
from caramba.lower.lowering import LoweredModel, lower
from caramba.model.model import TiedHead
from caramba.optim import local
from caramba.runs.events import append_event
from caramba.runtime import Decision, EmbeddingGradRows, GradientAverage, RuntimePlan, save_plan, takes_rows
from caramba.runtime.gradient_average import Missing


class RestoreOnExit(pl.Callback, ABC):
    """Calls `restore` when training ends or fails."""

    @abstractmethod
    def restore(self) -> None:
        """Put back what was changed."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.restore()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.restore()


class Lowering(RestoreOnExit):
    """Lowers the models of an objective before they are compiled, and restores them at the end.

    The decision `lowered` of plan.json has the modules of the trained model that each pass replaced.
    """

    def __init__(self, objective: Objective, plan: RuntimePlan, run_dir: Path) -> None:
        self.objective, self.plan, self.run_dir = objective, plan, run_dir
        self._lowered: list[LoweredModel] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        device, is_compiled = trainer.strategy.root_device, self.plan.value("compile_model") is not False
        teacher = self.objective.teacher
        if teacher is not None:
            self._lowered.append(lower(teacher, device, "prefill", is_compiled=is_compiled))
        trained = lower(self.objective.model, device, "train", is_compiled=is_compiled)
        self._lowered.append(trained)
        if trainer.is_global_zero:
            found = {name: count for name, count in trained.replaced.items() if count}
            decision = Decision(found, "modules that each pass of caramba.lower replaced")
            decisions = self.plan.decisions | {"lowered": decision}
            save_plan(self.run_dir / "plan.json", dataclasses.replace(self.plan, decisions=decisions))

    def restore(self) -> None:
        while self._lowered:
            self._lowered.pop().restore()


class Float8Products(RestoreOnExit):
    """Runs forward and backward products of linear layers in float8 while a phase trains.

    It replaces the layers before compilation and restores them at the end. Parameters stay the same objects under the
    same names. Layers of one input, which a compiled step fuses into one product, have the width of that product.
    Layers narrower than `least_width` on a side, or no multiple of 16, stay: a small product saves less than casting
    and scaling cost. The head and embeddings also stay.

    Reference: Micikevicius et al., 2022, arXiv:2209.05433 (the formats).
    """

    def __init__(self, model: nn.Module, recipe: str, least_width: int, run_dir: Path, *, is_compiled: bool) -> None:
        self.model, self.recipe, self.least_width, self.run_dir = model, recipe, least_width, run_dir
        self.is_compiled = is_compiled
        self._plain: dict[str, nn.Module] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        layers, left = float8_layers(self.model, self.least_width, is_compiled=self.is_compiled)
        if not layers:
            raise ConfigError(
                f"float8={self.recipe}: no linear layer is at least {self.least_width} wide on both sides, in "
                f"multiples of {TILE}; lower float8_min_width, or use float8=none"
            )
        recipe = Float8Recipe(cast(RecipeName, self.recipe), trainer.strategy.root_device)
        for name, layer in layers.items():
            self._plain[name] = layer
            self.model.set_submodule(name, Float8Linear(layer, recipe))
        if trainer.is_global_zero:
            append_event(self.run_dir, "float8", recipe=self.recipe, casts=recipe.casts, layers=list(layers), left=left)
        also = f", {len(left)} stay as they are: {_few(list(left))}" if left else ""
        logger.info(f"float8 {self.recipe}: {len(layers)} linear layers, cast by {recipe.casts}{also}")

    def restore(self) -> None:
        for name, layer in self._plain.items():
            self.model.set_submodule(name, layer)
        self._plain = {}


def float8_layers(
    model: nn.Module, least_width: int, *, is_compiled: bool
) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """Return a model's linear layers that are wide enough for float8 by name, and reasons for the others."""
    fused = _fused_widths(model) if is_compiled else {}
    chosen: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        # Not a LinearLayer, which is a node and takes a context.
        if type(module) is not nn.Linear or name.split(".")[0] == "head":
            continue
        n_out, n_in = module.weight.shape
        if n_out % TILE or n_in % TILE:
            left[name] = f"{n_in} to {n_out} features, of which one is no multiple of {TILE}"
        elif min(fused.get(id(module), n_out), n_in) < least_width:
            left[name] = f"{n_in} to {n_out} features, of which one is below {least_width}"
        else:
            chosen[name] = module
    return chosen, left


def _fused_widths(model: nn.Module) -> dict[int, int]:
    """Return id of a layer -> features of the one product that it is a part of, where all its parts can be cast."""
    found: dict[int, int] = {}
    for owner in model.modules():
        for kind in FAST:
            if not isinstance(owner, kind):
                continue
            layers = [owner.get_submodule(name) for name in FUSIBLE[kind][0]]
            plain = [layer for layer in layers if type(layer) is nn.Linear]
            trained = all(layer.weight.requires_grad for layer in plain)
            if trained and len(plain) == len(layers) and not any(one.out_features % TILE for one in plain):
                found |= {id(layer): sum(one.out_features for one in plain) for layer in plain}
    return found


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


class GradientAveraging(RestoreOnExit):
    """Gives the module what averages its gradients, `averaging`; it hooks the weights, which outlive the phase."""

    def __init__(self, parallel: ParallelConfig, phase: PhaseConfig) -> None:
        self.parallel, self.phase = parallel, phase
        self._made: GradientAverage | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        # A block that is applied several times has as many backwards; a schedule decides which blocks train.
        has_blocks = self.phase.phase in BLOCK_PHASES
        missing: Missing = "zeros" if self.parallel.find_unused_parameters else "refuse"
        is_narrow = self.parallel.reduce_dtype == "bfloat16" and not (has_blocks or self.phase.has_16_bit_weights)
        trained = pl_module.objective.trainable()
        table = pl_module.model.embedder.token
        is_whole = any(parameter is table.weight for _, parameter in trained)
        rows = None
        if is_whole and not has_blocks and missing == "refuse" and takes_rows(table):
            rows = EmbeddingGradRows(table, is_tied=isinstance(pl_module.model.head, TiedHead))
        self._made = pl_module.averaging = GradientAverage(
            trained,
            group_bytes=self.parallel.bytes_at_once(sum(one.nbytes for _, one in trained)),
            narrow=torch.bfloat16 if is_narrow else None,
            missing="leave" if has_blocks else missing,
            in_backward=not has_blocks,
            rows=rows,
        )

    def restore(self) -> None:
        if self._made is not None:
            self._made.remove()
            self._made = None


STEPS = 3
"""Optimiser steps that are looked at. Behind a head, a gate or a map that begins at zero gradients are zero at the
first step, and at the second where a schedule begins at zero too."""


class CompiledGradients(pl.Callback):
    """Looks at the first optimiser steps of a phase, for a compiled module in which no weight gets a gradient.

    Compared are modules of one model: a step counts in which some weight of it has a gradient other than zeros, and a
    module whose weights have had none in all that count ends the phase.

    Raises:
        CarambaError: there is such a module.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules, self.counted = tuple(modules), 0
        self._waiting: list[nn.Module] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.counted, self._waiting = 0, list(self.modules)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.counted == STEPS or not is_reached(pl_module.model):
            return
        self.counted += 1
        self._waiting = [one for one in self._waiting if not is_reached(one)]
        if self.counted == STEPS:
            missed = {id(parameter) for module in self._waiting for parameter in trainable_parameters(module)}
            names = [name for name, value in pl_module.model.named_parameters() if id(value) in missed]
            if names:
                some = ", ".join(names[:3]) + (" among them" if len(names) > 3 else "")
                raise CarambaError(
                    f"{pl_module.phase.phase}: compiled blocks are not trained: the gradients of {len(names)} weights "
                    f"are missing or zero in {STEPS} steps, {some}, and those of others are not; this is a fault of "
                    f"compilation with torch {torch.__version__}: run with train.compile=false"
                )


def trainable_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return a module's parameters that take gradients and of which something is on this rank."""
    return [one for one in module.parameters() if one.requires_grad and local(one).numel()]


def is_reached(module: nn.Module) -> bool:
    """Whether a module has a gradient other than zeros, or nothing that takes one."""
    parameters = trainable_parameters(module)
    grads = [local(one.grad) for one in parameters if one.grad is not None]
    if not grads:
        return not parameters
    largest = torch._foreach_norm(grads, torch.inf)  # pyright: ignore[reportPrivateImportUsage]
    return bool(torch.stack([value.float() for value in largest]).any())  # one look at the device


# Graphs of one forward: by kind of block, width, teacher or student, with and without gradients. Past the limit a
# forward runs uncompiled.
RECOMPILE_LIMIT = 64
# Before torch 2.12 a graph is taken again although a parameter has been frozen or freed since (pytorch#139476): a phase
# would still train the parameters of the phase before it, and no others.
SEES_FROZEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)
_of_last: list[tuple[weakref.ref[nn.Parameter], bool]] = []
"""Parameters of what was compiled last, and whether each took gradients."""


def forget_other_graphs(modules: Sequence[nn.Module]) -> None:
    """Have graphs taken again, unless they are of these modules with the same parameters frozen."""
    found = [(parameter, parameter.requires_grad) for module in modules for parameter in module.parameters()]
    is_same = len(found) == len(_of_last) and all(
        kept() is parameter and was_free == is_free
        for (kept, was_free), (parameter, is_free) in zip(_of_last, found, strict=True)
    )
    if not is_same:
        torch._dynamo.reset()
        _of_last[:] = [(weakref.ref(parameter), is_free) for parameter, is_free in found]


class Compilation(RestoreOnExit):
    """Replaces the forward of modules by a compiled one for the time of training.

    Only `forward` is replaced, so hooks on a module run outside its compiled code, and its state has the same names.

    Args:
        mode: of torch.compile. What it keeps in CUDA graphs (reduce-overhead, max-autotune) is given up at the start
            of every optimiser step, before which nothing of it is alive.
    """

    def __init__(self, modules: Sequence[nn.Module], mode: str = "default") -> None:
        self.modules, self.mode = tuple(modules), mode
        self._replaced: list[Any] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not SEES_FROZEN:
            forget_other_graphs(self.modules)
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, RECOMPILE_LIMIT)
        self._replaced = [module.__dict__.get("forward") for module in self.modules]
        for module in self.modules:
            module.forward = torch.compile(module.forward, mode=self.mode)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.micro_steps == 0:
            self.begin_step()

    def begin_step(self) -> None:
        """Give up what CUDA graphs have returned before."""
        if self.mode != "default":
            torch.compiler.cudagraph_mark_step_begin()

    def restore(self) -> None:
        for module, before in zip(self.modules, self._replaced, strict=False):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before
        self._replaced = []
