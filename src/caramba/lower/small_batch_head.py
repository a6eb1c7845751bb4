"""Pass `small_batch_head`: logits of a small batch by `small_batch_linear`, where it has a kernel."""

from __future__ import annotations

from torch import Tensor, nn

from caramba.layer.small_batch import has_kernel_weight, is_small_batch
from caramba.lower.replaced import Replaced
from caramba.model.model import Head, TiedHead
from caramba.ops import has_kernel
from caramba.ops.small_batch_linear import small_batch_linear


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
    # Exact types: tensor parallelism and quantisation change the class of a head.
    return [_lower(head) for head in model.modules() if type(head) in LOWERED]


def _lower(head: nn.Module) -> Replaced:
    plain = type(head)
    head.__class__ = LOWERED[plain]
    return Replaced(head, lambda: setattr(head, "__class__", plain))
