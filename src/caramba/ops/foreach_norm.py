"""The op `caramba::foreach_norm`: the 2-norm of each of many tensors, in one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct


def foreach_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return norms_i = sqrt(sum_j x_ij^2), computed in at least fp32, in the same order of additions every time.

    Shape: n tensors of any shapes, contiguous and on one device -> [n], in fp32 or, where one is float64, in that.

    Raises:
        ConfigError: no tensor, or one on another device, not contiguous or not floating.
    """
    if not tensors:
        raise ConfigError("foreach_norm: got no tensor, expected one at least")
    device = tensors[0].device
    for index, x in enumerate(tensors):
        if x.device != device or not x.is_contiguous() or not x.is_floating_point():
            raise ConfigError(
                f"foreach_norm: tensor {index} is {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}, on "
                f"{x.device}; expected contiguous floating ones on {device}"
            )
    if _dtype_of(tensors) == torch.float64:  # which no kernel takes
        return reference_foreach_norm(list(tensors))
    run = direct("foreach_norm", *tensors) or torch.ops.caramba.foreach_norm.default
    return run(list(tensors))


def _dtype_of(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32


@caramba_op("foreach_norm", fake=lambda tensors: tensors[0].new_empty(len(tensors), dtype=_dtype_of(tensors)))
def reference_foreach_norm(tensors: list[Tensor]) -> Tensor:
    """Compute the op in plain PyTorch."""
    dtype = _dtype_of(tensors)
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype))  # pyright: ignore[reportPrivateImportUsage]
