"""From features to logits over the vocabulary."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from caramba.config.model import ModelSpec


class Head(nn.Linear):
    """Projection to the vocabulary with weights of its own.

    Shape: hidden [..., M] to logits [..., V].
    """

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class TiedHead(nn.Module):
    """Projection to the vocabulary by the token embedding, which is passed in, so that it has one owner and
    name.

    Shape: hidden [..., M] and the embedding [V, M] to logits [..., V].

    Reference: Press and Wolf, 2016, arXiv:1608.05859.
    """

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        return F.linear(input, token_weight)


def build_head(spec: ModelSpec) -> Head | TiedHead:
    """Return the head that the spec asks for."""
    if spec.head.tied:
        return TiedHead()
    return Head(spec.embedder.d_model, spec.embedder.vocab_size, bias=spec.head.bias)
