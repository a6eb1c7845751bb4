"""Training on the loss of a plugin in place of cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from caramba.config.extension import user_traceback
from caramba.data import documents_of
from caramba.distill.lora import Lora
from caramba.distill.objective import Backward, Batch, LanguageModelObjective
from caramba.distill.vocabulary import cross_entropy
from caramba.errors import CarambaError, ExtensionFailedError
from caramba.model import Model


class PluginLossObjective(LanguageModelObjective):
    """Minimises `function(logits, targets)`; `loss` is its value and `ce` the cross-entropy of the same logits.

    Shape: logits [B, T, V], targets [B, T] int64 with IGNORED where none counts; the loss is a scalar.
    """

    def __init__(
        self,
        model: Model,
        function: Callable[[Tensor, Tensor], Tensor],
        *,
        name: str,
        lora: Lora | None = None,
    ) -> None:
        super().__init__(model, lora=lora, dense=True)
        self.function, self.name = function, name

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss, ce = self._losses(batch)
        backward(loss)
        return {"loss": loss.detach(), "ce": ce}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        loss, ce = self._losses(batch)
        return {"loss": loss, "ce": ce}

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(self.model.hidden(batch[0], documents=documents_of(batch)))
        try:
            loss = self.function(logits, batch[1])
        except (CarambaError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise ExtensionFailedError(
                f"train.loss ({self.name}) failed: {user_traceback(error)}; correct it"
            ) from error
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            got = f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ExtensionFailedError(
                f"train.loss ({self.name}) returned {got}; expected a scalar tensor of floats"
            )
        with torch.no_grad():
            ce = cross_entropy(logits.detach(), batch[1])
        return loss.reshape(()), ce
