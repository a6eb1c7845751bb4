"""Precision as Lightning runs it: loss scaling for float16, TF32 for the time of a phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from caramba.runtime import RuntimePlan


class ScaledPrecision(MixedPrecision):
    """Autocast in float16 with a scaled loss. Gradients are unscaled by the module, before it clips them.

    Lightning's own unscales within the step of an optimiser, and not at all for a fused one, so that gradients would be
    clipped while they are scaled.
    """

    def __init__(self, device: str) -> None:
        super().__init__("16-mixed", device)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self.scaler is not None
        closure()
        self._after_closure(model, optimizer)
        stepped = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return stepped


def precision_arguments(plan: RuntimePlan) -> tuple[Any, list[Any]]:
    """Return the Trainer's `precision`, and the plugins that take its place."""
    mode = plan.value("precision")
    if mode == "16-mixed":
        return None, [ScaledPrecision(plan.value("device"))]
    # Weights in bfloat16 are the module's work: Lightning's "bf16-true" would make new tensors of losses bfloat16 too.
    return "32-true" if mode == "bf16-true" else mode, []


@contextmanager
def matmul_precision(plan: RuntimePlan) -> Iterator[None]:
    """Compute float32 matrix products in TF32 while a phase trains, if its plan has TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if plan.value("tf32") else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
