"""float8 as seen by Lightning: matrix products of large linear layers run in it while a phase trains."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import lightning.pytorch as pl
from torch import nn

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.lower.float8 import TILE, Float8Linear, Float8Recipe, RecipeName
from caramba.lower.fuse_linears import FUSIBLE
from caramba.lower.fuse_training import FAST
from caramba.runs.events import append_event
from caramba.train.callbacks.restore_on_exit import RestoreOnExit


class Float8Products(RestoreOnExit):
    """Runs forward and backward products of linear layers in float8 while a phase trains.

    It replaces the layers before compilation and restores them at the end. Parameters stay the same objects under the
    same names. Layers of one input, which a compiled step fuses into one product, have the width of that product.
    Layers narrower than `least_width` on a side, or no multiple of 16, stay: a small product saves less than casting
    and scaling cost. The head and embeddings also stay.

    Reference: Micikevicius et al., 2022, arXiv:2209.05433 (the formats).
    """

    def __init__(
        self, model: nn.Module, recipe: str, least_width: int, run_dir: Path, *, is_compiled: bool
    ) -> None:
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
            append_event(
                self.run_dir, "float8", recipe=self.recipe, casts=recipe.casts, layers=list(layers), left=left
            )
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
