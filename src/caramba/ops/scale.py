"""The op `caramba::scale_`: a large tensor times a number that only the device knows, in place."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op


def scale_(x: Tensor, by: Tensor) -> Tensor:
    """Multiply x by a tensor of one element, in place, and return it.

    The kernel computes in at least fp32, rounds once, and touches nothing where the number is 1, as the scale of a
    loss without accumulation is; torch's own product of two devices' tensors of unlike dtypes runs at a tenth of the
    bandwidth.

    Shape: x any, by [] on its device.

    Raises:
        ConfigError: more than one element, another device, or what is not floating.
    """
    if by.numel() != 1 or not (x.is_floating_point() and by.is_floating_point()) or by.device != x.device:
        raise ConfigError(
            f"scale_: x is {x.dtype} on {x.device} and the factor {by.dtype} {tuple(by.shape)} on {by.device}; "
            "expected floating dtypes, one element and one device"
        )
    torch.ops.caramba.scale_.default(x, by)
    return x


@caramba_op("scale_", mutates=("x",))
def reference_scale(x: Tensor, by: Tensor) -> None:
    """Compute the op in plain PyTorch."""
    x.mul_(by.reshape(()))
