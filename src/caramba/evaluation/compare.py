"""L1 distance between teacher and student on the same batches: attention outputs by layer, and logits."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.verify import CompareVerifyConfig
from caramba.data import Windows, batches, documents_of, spread_windows
from caramba.layer import AttentionLayer
from caramba.model import Model, Trace
from caramba.result import Check
from caramba.runtime.device import wide_dtype


class _L1:
    """Running mean and maximum of |a - b|."""

    def __init__(self) -> None:
        self.total, self.count, self.largest = 0.0, 0, 0.0

    def add(self, a: Tensor, b: Tensor) -> None:
        difference = (a.float() - b.float()).abs()
        self.total += difference.to(wide_dtype(difference.device)).sum().item()
        self.count += difference.numel()
        self.largest = max(self.largest, difference.max().item())

    @property
    def mean(self) -> float:
        return self.total / self.count


def _is_attention(_name: str, module: torch.nn.Module) -> bool:
    return isinstance(module, AttentionLayer)


@torch.inference_mode()
def compare(
    teacher: Model,
    student: Model,
    dataset: Windows,
    config: CompareVerifyConfig,
    device: torch.device,
) -> tuple[Check, ...]:
    """Run both models on the same held-out batches; each on its own hidden states, so errors accumulate with depth.

    `attention_mean_l1` is the largest of the layers' means: one bad layer is not hidden by good ones.
    Padding is left out. Shape: attention outputs [B, T, M], logits [B, T, V].
    """
    indices = spread_windows(len(dataset), config.batches * config.batch_size)
    layers: list[_L1] = []
    logits = _L1()
    for batch in batches(dataset, indices, config.batch_size):
        x, documents = batch[0].to(device), documents_of(batch)
        documents = None if documents is None else documents.to(device)
        counted = ... if documents is None else documents >= 0
        with Trace(teacher, predicate=_is_attention) as ours:
            reference = teacher(x, documents=documents)
        with Trace(student, predicate=_is_attention) as theirs:
            found = student(x, documents=documents)
        logits.add(found[counted], reference[counted])
        layers = layers or [_L1() for _ in ours.outputs]
        for layer, a, b in zip(layers, theirs.outputs, ours.outputs, strict=True):
            layer.add(a[counted], b[counted])
    checks = [
        Check("attention_mean_l1", max(layer.mean for layer in layers), config.attention.max_mean_l1),
        Check("attention_max_l1", max(layer.largest for layer in layers), config.attention.max_max_l1),
        Check("logits_mean_l1", logits.mean, config.logits.max_mean_l1),
        Check("logits_max_l1", logits.largest, config.logits.max_max_l1),
    ]
    each = [Check(f"attention_mean_l1_layer{index}", layer.mean, None) for index, layer in enumerate(layers)]
    return (*checks, *each)
