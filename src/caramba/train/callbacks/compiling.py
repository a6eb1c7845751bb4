"""Compilation as seen by Lightning: compiled code runs while a phase trains, and at no other time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch._dynamo import config as dynamo_config

from caramba.train.callbacks.restore_on_exit import RestoreOnExit

# Graphs of one forward: by kind of block, width, teacher or student, with and without gradients. Past the limit a
# forward runs uncompiled.
RECOMPILE_LIMIT = 64
# Before torch 2.12 a graph is taken again although a parameter has been frozen or freed since (pytorch#139476): a phase
# would still train the parameters of the phase before it, and no others.
SEES_FROZEN = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 12)


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
            torch._dynamo.reset()
        dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, RECOMPILE_LIMIT)
        self._replaced = [module.__dict__.get("forward") for module in self.modules]
        for module in self.modules:
            module.forward = torch.compile(module.forward, mode=self.mode)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.mode != "default" and pl_module.micro_steps == 0:
            torch.compiler.cudagraph_mark_step_begin()

    def restore(self) -> None:
        for module, before in zip(self.modules, self._replaced, strict=False):
            if before is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = before
        self._replaced = []
