"""Dropout."""

from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.layer import DropoutLayerConfig


class DropoutLayer(nn.Dropout):
    """Dropout: zero each element with probability p in training, scale the others by 1 / (1 - p).

    Identity in eval mode. Shape: unchanged.

    Reference: Srivastava et al., 2014, JMLR 15(56).
    """

    def __init__(self, config: DropoutLayerConfig) -> None:
        super().__init__(config.p)

    def forward(self, input: Tensor, ctx: Context | None = None) -> Tensor:
        return super().forward(input)
