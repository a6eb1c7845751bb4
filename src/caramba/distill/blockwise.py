"""Concurrent blockwise distillation: one teacher pass trains every student attention on its own block.

Each student attention gets the input that the teacher's attention of that block got, and is trained on what the teacher
gave out. Its backward runs inside the teacher's forward and its graph is freed before the next block, so memory is that
of one block, and the student's stack and head never run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from caramba.distill.objective import Backward, Batch
from caramba.layer import AttentionLayer, Documents
from caramba.measure import documents_of
from caramba.model import Model

Pair = tuple[str, AttentionLayer, AttentionLayer]
OnBlock = Callable[[str, AttentionLayer, Tensor, Tensor], None]


def relative_l1(predicted: Tensor, target: Tensor, documents: Tensor | None = None) -> Tensor:
    """Scale-free L1: sum|o_s - o_t| / sum|o_t|, in fp32; padding, of document -1, is left out.

    Shape: both [B, T, M], documents [B, T] -> [].
    """
    predicted, target = predicted.float(), target.float()
    if documents is not None:
        counted = (documents >= 0)[..., None]
        predicted, target = predicted * counted, target * counted
    return (predicted - target).abs().sum() / target.abs().sum().clamp_min(torch.finfo(torch.float32).tiny)


@torch.no_grad()
def tap_blocks(
    teacher: Model,
    pairs: Sequence[Pair],
    tokens: Tensor,
    on_block: OnBlock,
    documents: Tensor | None = None,
) -> None:
    """Run the teacher without its head on tokens [B, T]; call on_block(name, student layer, input, output) per block.

    A teacher layer that runs several times (shared weights) calls once for each application. `documents` [B, T] are
    kept apart, as in `Model`.
    """

    def hook_of(name: str, student: AttentionLayer) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            on_block(name, student, inputs[0], output)

        return hook

    with ExitStack() as stack:
        for name, source, target in pairs:
            stack.callback(source.register_forward_hook(hook_of(name, target)).remove)
        teacher.hidden(tokens, documents=documents)


class BlockwiseObjective:
    """Trains the attention layers of `model` on the teacher's blocks; `loss` is the mean over blocks."""

    def __init__(self, model: Model, teacher: Model, pairs: Sequence[Pair]) -> None:
        self.model, self.teacher, self.pairs = model, teacher, tuple(pairs)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"{name}.{key}", value)
            for name, _, layer in self.pairs
            for key, value in layer.named_parameters()
        ]

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        documents = documents_of(batch)
        apart = None if documents is None else Documents.of(documents)

        def train(student: AttentionLayer, x: Tensor, target: Tensor) -> Tensor:
            with torch.enable_grad():
                loss = relative_l1(student(x, apart), target, documents)
                backward(loss)
            return loss.detach()

        return self._per_block(batch, train)

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        documents = documents_of(batch)
        apart = None if documents is None else Documents.of(documents)
        return self._per_block(
            batch, lambda student, x, target: relative_l1(student(x, apart), target, documents)
        )

    def _per_block(
        self, batch: Batch, loss_of: Callable[[AttentionLayer, Tensor, Tensor], Tensor]
    ) -> dict[str, Tensor]:
        losses: dict[str, list[Tensor]] = {}

        def on_block(name: str, student: AttentionLayer, x: Tensor, target: Tensor) -> None:
            losses.setdefault(name, []).append(loss_of(student, x, target))

        tap_blocks(self.teacher, self.pairs, batch[0], on_block, documents_of(batch))
        blocks = {f"block/{name}": torch.stack(values).mean() for name, values in losses.items()}
        return {"loss": torch.stack(list(blocks.values())).mean(), **blocks}


@torch.no_grad()
def block_errors(
    teacher: Model, pairs: Sequence[Pair], tokens: Tensor, documents: Tensor | None = None
) -> tuple[float, ...]:
    """Measure each block's relative L1 error on tokens [B, T], in the order of `pairs`."""
    batch = (tokens, tokens) if documents is None else (tokens, tokens, documents)
    blocks = BlockwiseObjective(teacher, teacher, pairs).evaluate(batch)
    return tuple(float(blocks[f"block/{name}"]) for name, _, _ in pairs)
