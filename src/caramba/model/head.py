"""From features to logits over the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from caramba.config.model import ModelSpec
from caramba.layer.small_batch import has_kernel_weight, is_small_batch
from caramba.ops.small_batch_linear import small_batch_linear


class Head(nn.Linear):
    """Projection to the vocabulary with weights of its own.

    Shape: hidden [..., M] to logits [..., V].
    """

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        return logits_of(input, self.weight, self.bias)


class TiedHead(nn.Module):
    """Projection to the vocabulary by the token embedding, which is passed in, so that it has one owner and
    name.

    Shape: hidden [..., M] and the embedding [V, M] to logits [..., V].

    Reference: Press and Wolf, 2016, arXiv:1608.05859.
    """

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        return logits_of(input, token_weight)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W h + b: of few rows by the kernel for them, where there is one. Shape: [..., M] to [..., V]."""
    if (
        is_small_batch(hidden)
        and has_kernel_weight(hidden, weight)
        and (bias is None or bias.dtype == hidden.dtype)
    ):
        return small_batch_linear(hidden, weight, bias)
    return F.linear(hidden, weight, bias)


def build_head(spec: ModelSpec) -> Head | TiedHead:
    """Return the head that the spec asks for."""
    if spec.head.tied:
        return TiedHead()
    return Head(spec.embedder.d_model, spec.embedder.vocab_size, bias=spec.head.bias)
