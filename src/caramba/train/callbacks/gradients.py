"""Check that compiled code gives every trained parameter a gradient: a compiler may lose one silently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from caramba.errors import CarambaError
from caramba.optim import local

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
