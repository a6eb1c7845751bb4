"""What a callback changes in a model for the time of training, and puts back however that ends."""

from __future__ import annotations

from abc import ABC, abstractmethod

import lightning.pytorch as pl


class RestoreOnExit(pl.Callback, ABC):
    """Calls `restore` when training ends or fails."""

    @abstractmethod
    def restore(self) -> None:
        """Put back what was changed."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.restore()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.restore()
