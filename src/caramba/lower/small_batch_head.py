"""Pass `small_batch_head`: logits of a small batch by `small_batch_linear`, where it has a kernel."""

from __future__ import annotations

from torch import Tensor, nn

from caramba.layer.small_batch import is_small_batch
from caramba.lower.replaced import Replaced, has_hooks, plain_class, replace_class
from caramba.model.model import Head, TiedHead
from caramba.ops import has_kernel
from caramba.ops.small_batch_linear import rows_fit, small_batch_linear


class SmallBatchHead(Head):
    """A head that runs small batches by the kernel, and anything else by its own forward."""

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        bias = self.bias
        has_bias_of_input = bias is None or bias.dtype == input.dtype
        if has_bias_of_input and is_small_batch(input) and has_kernel_weight(input, self.weight):
            return small_batch_linear(input, self.weight, bias)
        return super().forward(input, token_weight)


class SmallBatchTiedHead(TiedHead):
    """A tied head that runs small batches by the kernel, and anything else by its own forward."""

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        if is_small_batch(input) and has_kernel_weight(input, token_weight):
            return small_batch_linear(input, token_weight)
        return super().forward(input, token_weight)


LOWERED: dict[type[nn.Module], type[nn.Module]] = {Head: SmallBatchHead, TiedHead: SmallBatchTiedHead}


def small_batch_head(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower plain heads on a device with the kernel; return them."""
    weight = next(model.parameters(), None)
    if weight is None or not has_kernel("small_batch_linear", weight):
        return []
    # Exact classes: tensor parallelism and quantisation change the class of a head.
    return [
        replace_class(head, fast)
        for head in model.modules()
        if (fast := LOWERED.get(plain_class(head))) and not isinstance(head, fast) and not has_hooks(head)
    ]


def has_kernel_weight(x: Tensor, weight: Tensor) -> bool:
    """True if the small-batch kernel supports the product of x and a plain weight, not quantised or sharded."""
    return type(weight) is nn.Parameter and rows_fit(x, weight)
