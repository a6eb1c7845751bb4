"""The op `caramba::lion_step`: Lion's update of many tensors, in place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct, upcast


def lion_step(
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.0,
) -> None:
    """Update parameters and momenta in place, in at least fp32, each rounded to its own dtype once:

        w <- (1 - lr weight_decay) w - lr sign(beta1 m + (1 - beta1) g),  m <- beta2 m + (1 - beta2) g

    Every product and sum is rounded by itself, so that all implementations give the same bits in fp32. The sign of NaN
    is NaN: a weight whose momentum is lost does not stay a number that nothing moves any more.

    Shape: three lists of one length; tensor i of each has one shape, is contiguous and on one device.

    Raises:
        ConfigError: lists or shapes that differ, tensors that are not contiguous or not floating, or more than one
            device.

    Reference: Chen et al., 2023, arXiv:2302.06675.
    """
    lengths = (len(parameters), len(momenta), len(grads))
    if len(set(lengths)) != 1:
        raise ConfigError(f"lion_step: {lengths} parameters, momenta and gradients; expected as many of each")
    if not parameters:
        return
    device = parameters[0].device
    for index, group in enumerate(zip(parameters, momenta, grads, strict=True)):
        p, m, g = group
        if (
            p.shape == m.shape == g.shape
            and p.device == m.device == g.device == device
            and (p.is_contiguous() and m.is_contiguous() and g.is_contiguous())
            and (p.is_floating_point() and m.is_floating_point() and g.is_floating_point())
        ):
            continue
        for name, tensor in zip(("parameter", "momentum", "gradient"), group, strict=True):
            places = tensor.shape == group[0].shape and tensor.device == device
            if not (places and tensor.is_contiguous() and tensor.is_floating_point()):
                raise ConfigError(
                    f"lion_step: {name} {index} is {tensor.dtype} of shape {tuple(tensor.shape)}, strides "
                    f"{tensor.stride()}, on {tensor.device}; expected contiguous floating {tuple(group[0].shape)} on "
                    f"{device}"
                )
    run = None if torch.is_grad_enabled() else direct("lion_step", *parameters)
    if run is None:
        run = torch.ops.caramba.lion_step.default
    else:  # as the op would, so that a backward through what has changed is refused
        torch.autograd.graph.increment_version((*parameters, *momenta))
    run(list(parameters), list(momenta), list(grads), lr, beta1, beta2, weight_decay)


@caramba_op("lion_step", mutates=("parameters", "momenta"))
def reference_lion_step(
    parameters: list[Tensor],
    momenta: list[Tensor],
    grads: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Compute the op in plain PyTorch."""
    # No alpha= or lerp: they fuse a product into a sum on some devices, which rounds once where others round twice.
    for parameter, momentum, grad in zip(parameters, momenta, grads, strict=True):
        wide, moment, slope = upcast(parameter), upcast(momentum), upcast(grad)
        mixed = moment * beta1 + slope * (1 - beta1)
        direction = torch.where(mixed == mixed, torch.sign(mixed), mixed)  # torch's sign of NaN is 0
        parameter.copy_(wide * (1 - lr * weight_decay) - direction * lr)
        momentum.copy_(moment * beta2 + slope * (1 - beta2))
