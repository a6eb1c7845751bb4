"""float8 as seen by Lightning: matrix products of large linear layers run in it while a phase trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.runs.events import append_event
from caramba.train.callbacks.while_training import WhileTraining

TILE = 16  # of both widths, which the hardware's products are made of


class Float8Products(WhileTraining):
    """Replaces linear layers by torchao's, whose products of forward and backward are in float8, before anything is
    compiled, and puts plain ones in their place at the end. Parameters stay the same objects under the same names.

    Layers whose narrower side is below `least_width`, or no multiple of 16, stay as they are: what casting and scaling
    cost, a small product does not save. The head and embeddings are no such layers.

    Reference: Micikevicius et al., 2022, arXiv:2209.05433 (the formats).
    """

    def __init__(self, model: nn.Module, recipe: str, least_width: int, run_dir: Path) -> None:
        self.model, self.recipe, self.least_width, self.run_dir = model, recipe, least_width, run_dir
        self._plain: dict[str, nn.Module] = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        convert = _converter(self.recipe)
        layers = float8_layers(self.model, self.least_width)
        if not layers:
            raise ConfigError(
                f"float8={self.recipe}: no linear layer is at least {self.least_width} wide on both sides, in "
                f"multiples of {TILE}; lower float8_min_width, or use float8=none"
            )
        for name, layer in layers.items():
            self._plain[name] = layer
            self.model.set_submodule(name, convert(layer))
        if trainer.is_global_zero:
            append_event(self.run_dir, "float8", recipe=self.recipe, layers=list(layers))
        logger.info(f"float8 {self.recipe}: {len(layers)} linear layers")

    def restore(self) -> None:
        for name, layer in self._plain.items():
            self.model.set_submodule(name, layer)
        self._plain = {}


def float8_layers(model: nn.Module, least_width: int) -> dict[str, nn.Linear]:
    """Return the linear layers of a model that are wide enough for float8, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear  # not a LinearLayer, which is a node and takes a context
        and name.split(".")[0] != "head"
        and min(module.weight.shape) >= least_width
        and not any(width % TILE for width in module.weight.shape)
    }


def _converter(recipe: str) -> Callable[[nn.Linear], nn.Module]:
    from torchao.float8 import (  # pyright: ignore[reportMissingImports] - optional, and slow to import
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config: Any = Float8LinearConfig.from_recipe_name(recipe)
    return lambda layer: convert_to_float8_training(layer, config=config)
