"""Linear map, optionally over a reduced stack."""

from collections.abc import Callable

from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.layer import LinearLayerConfig

REDUCTIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "mean": lambda x: x.mean(dim=-2),
    "sum": lambda x: x.sum(dim=-2),
    "concat": lambda x: x.flatten(-2),
}


class LinearLayer(nn.Linear):
    """Linear map y = W x + b, after `reduce` has consumed dimension -2, the stack of a ParallelTopology.

    Shape: [..., d_in] to [..., d_out]; with reduce mean or sum [..., N, d_in], with concat [..., N, d_in /
    N].
    """

    def __init__(self, config: LinearLayerConfig) -> None:
        super().__init__(config.d_in, config.d_out, bias=config.bias)
        self.reduce = REDUCTIONS[config.reduce]

    def forward(self, input: Tensor, ctx: Context | None = None) -> Tensor:
        return super().forward(self.reduce(input))
