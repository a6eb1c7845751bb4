"""Steps with products in float8: the recipes that take turns, and their results against bfloat16."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from cases.training_sides import Side
from cases.training_turns import Turns

from caramba.layer.float8 import Float8Recipe
from caramba.ops.backend import without_kernels

RECIPES = "rowwise,tensorwise,rowwise_with_gw_hp"
MUST_FP8 = 1.15
TRAINER = "caramba"
WITHOUT = {"": (), "apart": ("float8_swiglu",), "torchao": ("float8_cast",)}


def recipes_of(words: str, device: torch.device) -> Iterator[tuple[str, Float8Recipe]]:
    """Yield name and recipe of each NAME in a list with commas.

    NAME/apart separates SwiGLU from its casts, and NAME/torchao casts by torchao.
    """
    for asked in words.split(","):
        name, _, casts = asked.partition("/")
        if name not in RECIPES.split(",") or casts not in WITHOUT:
            raise SystemExit(
                f"--recipes: got {asked!r}, expected some of {RECIPES}, each with /apart or /torchao or alone"
            )
        with without_kernels(*WITHOUT[casts]) if casts else contextlib.nullcontext():
            recipe = Float8Recipe(name, device)  # pyright: ignore[reportArgumentType] - torchao refuses others
        yield f"float8 {name}, cast by {recipe.casts}", recipe


def float8_of(turns: Turns, sides: dict[str, Side], bf16: str, through_trainer: str) -> dict[str, Any]:
    """Return every side's speed over the side `bf16`, the Trainer's with its recipe compared with the must, and
    losses.

    `loss_change` is of the last step of those whose losses are kept, from the same weights on the same batch.
    """
    over = {
        name: statistics.median(b / a for a, b in zip(seconds, turns.seconds[bf16], strict=False))
        for name, seconds in turns.seconds.items()
        if name != bf16
    }
    losses = {name: [round(float(loss), 5) for loss in side.losses] for name, side in sides.items()}
    return {
        "float8": through_trainer,
        "over_bf16": over,
        "losses": losses,
        "loss_change": {name: row[-1] - losses[bf16][-1] for name, row in losses.items() if row},
        "musts": [
            {
                "over": bf16,
                "limit": MUST_FP8,
                "got": over[TRAINER],
                "by": f"{TRAINER} with float8={through_trainer}",
            }
        ],
    }
