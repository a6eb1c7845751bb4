"""What a phase minimises. An objective owns its losses and which weights they train; Lightning only drives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caramba.data import IGNORED
from caramba.measure import documents_of
from caramba.model import Model

Batch = tuple[Tensor, ...]
"""x and y [B, T] int64, y being IGNORED where nothing counts; and document ids [B, T] where they are kept apart."""
Backward = Callable[[Tensor], None]


class Objective(Protocol):
    """One step of training: call `backward` on one or more scalar losses, return detached scalars with a `loss`."""

    model: Model

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the named parameters of `model` that this objective trains."""
        ...

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """Run forward and backward on a batch."""
        ...

    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Return the same scalars as `step` without gradients, in eval mode."""
        ...


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean next-token cross-entropy in nats over the targets that count, computed in fp32.

    Shape: logits [B, T, V], targets [B, T] -> [].
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)


def teacher_kl(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, targets: Tensor | None = None
) -> Tensor:
    """KL(teacher || student) in nats, mean over tokens, times temperature^2 (Hinton et al., 2015, arXiv:1503.02531).

    With `targets` the mean is over the tokens whose target counts.

    Shape: both [B, T, V], targets [B, T] -> []. Computed in fp32.
    """
    ours = F.log_softmax(student_logits.flatten(0, 1).float() / temperature, dim=-1)
    theirs = F.log_softmax(teacher_logits.flatten(0, 1).float() / temperature, dim=-1)
    if targets is None:
        return F.kl_div(ours, theirs, log_target=True, reduction="batchmean") * temperature**2
    counted = targets.flatten() != IGNORED
    each = F.kl_div(ours, theirs, log_target=True, reduction="none").sum(dim=-1)
    return torch.where(counted, each, 0.0).sum() / counted.sum() * temperature**2


class LanguageModelObjective:
    """Next-token cross-entropy of one model; trains all of its weights."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss = cross_entropy(self.model(batch[0], documents=documents_of(batch)), batch[1])
        backward(loss)
        return {"loss": loss.detach()}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.model(batch[0], documents=documents_of(batch)), batch[1])}


class TeacherKLObjective:
    """KL of the student's next-token distribution to its teacher's; trains all of the student's weights."""

    def __init__(self, model: Model, teacher: Model, temperature: float = 1.0) -> None:
        self.model, self.teacher, self.temperature = model, teacher, temperature

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor]:
        documents = documents_of(batch)
        with torch.no_grad():
            targets = self.teacher(batch[0], documents=documents)
        logits = self.model(batch[0], documents=documents)
        loss = teacher_kl(logits, targets, self.temperature, None if documents is None else batch[1])
        with torch.no_grad():
            return loss, cross_entropy(logits, batch[1])

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        loss, ce = self._losses(batch)
        backward(loss)
        return {"loss": loss.detach(), "ce": ce}

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        loss, ce = self._losses(batch)
        return {"loss": loss, "ce": ce}
