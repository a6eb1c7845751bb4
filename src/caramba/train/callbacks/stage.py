"""What is measured when a phase has ended: thresholds and benchmarks, as plain functions given by the experiment."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl


class Verification(pl.Callback):
    """Runs a phase's checks on the weights that the phase ended with. The function records its verdicts."""

    def __init__(self, check: Callable[[], None]) -> None:
        self.check = check

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.check()


class BenchmarkArtifacts(pl.Callback):
    """Measures the row that this phase adds to the tables. The function records its results."""

    def __init__(self, measure: Callable[[], None]) -> None:
        self.measure = measure

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.measure()
