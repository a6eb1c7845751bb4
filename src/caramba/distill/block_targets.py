"""What the teacher's attention layers read and give: computed by a truncated forward, or read from disk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from caramba.distill.capture import OnCall, capture_attention_io
from caramba.distill.objective import Batch
from caramba.distill.teacher_cache import TeacherCache
from caramba.layer import AttentionLayer
from caramba.metrics import documents_of, samples_of
from caramba.model import Model
from caramba.model.topology import attention_applications


class BlockTargets:
    """Inputs and outputs of the teacher's attention layers under the student's names of them.

    With a cache a sample's inputs and outputs of all layers are kept, and the teacher runs once per sample.
    """

    def __init__(
        self,
        teacher: Model,
        pairs: Sequence[tuple[str, AttentionLayer, AttentionLayer]],
        cache: TeacherCache | None = None,
    ) -> None:
        self.teacher, self.cache = teacher, cache
        self.layers = {name: source for name, source, _ in pairs}
        names = {id(source): name for name, source, _ in pairs}
        self.order = [names[id(layer)] for _, layer in attention_applications(teacher) if id(layer) in names]

    def visit(self, batch: Batch, names: Sequence[str], on_call: OnCall) -> None:
        """Call on_call(name, input, output) for every application of the layers `names`, in execution order."""
        tokens, documents, samples = batch[0], documents_of(batch), samples_of(batch)
        if self.cache is None or samples is None:  # held-out batches carry no index
            layers = [(name, self.layers[name]) for name in names]
            capture_attention_io(self.teacher, layers, tokens, on_call, documents)
            return
        kept = self.cache.fetch(
            samples,
            lambda rows: self._all(tokens[rows], None if documents is None else documents[rows]),
        )
        for place, name in enumerate(self.order):
            if name in names:
                on_call(name, kept[f"{place}.x"], kept[f"{place}.o"])

    @torch.no_grad()
    def _all(self, tokens: Tensor, documents: Tensor | None) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}

        def keep(_name: str, x: Tensor, output: Tensor) -> None:
            place = len(made) // 2
            made[f"{place}.x"], made[f"{place}.o"] = x, output

        capture_attention_io(self.teacher, list(self.layers.items()), tokens, keep, documents)
        return made
