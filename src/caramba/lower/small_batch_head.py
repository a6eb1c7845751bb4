"""Pass `small_batch_head`: logits of a small batch by `small_batch_linear`, where it has a kernel."""

from __future__ import annotations

from torch import Tensor, nn

from caramba.layer.small_batch import is_small_batch
from caramba.lower.replaced import Replaced, plain_class, replace_each
from caramba.model.model import Head, TiedHead
from caramba.ops import has_kernel
from caramba.ops.small_batch_linear import rows_fit, small_batch_linear


class SmallBatchHead(nn.Module):
    """A head, tied or not, that runs small batches by the kernel, and anything else by its own forward."""

    def forward(self, input: Tensor, token_weight: Tensor) -> Tensor:
        weight, bias = getattr(self, "weight", token_weight), getattr(self, "bias", None)
        has_bias_of_input = bias is None or bias.dtype == input.dtype
        if has_bias_of_input and is_small_batch(input) and has_kernel_weight(input, weight):
            return small_batch_linear(input, weight, bias)
        return super().forward(input, token_weight)  # pyright: ignore[reportAttributeAccessIssue]


def small_batch_head(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower plain heads on a device with the kernel; return them."""
    weight = next(model.parameters(), None)
    if weight is None or not has_kernel("small_batch_linear", weight):
        return []
    # Exact classes: tensor parallelism and quantisation change the class of a head.
    return replace_each(model, nn.Module, SmallBatchHead, lambda head: plain_class(head) in (Head, TiedHead))


def has_kernel_weight(x: Tensor, weight: Tensor) -> bool:
    """True if the small-batch kernel supports the product of x and a plain weight, not quantised or sharded."""
    return type(weight) is nn.Parameter and rows_fit(x, weight)
