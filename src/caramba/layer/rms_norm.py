"""Root-mean-square normalisation."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache import Context
from caramba.config.layer import RMSNormLayerConfig
from caramba.ops import is_fused
from caramba.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """Scale the last dimension to unit root mean square: y = x / sqrt(mean(x^2) + eps) * weight.

    The norm is taken in the wider of the input's and the weight's dtype (in fp32 inside the kernel for 16-bit
    tensors) and returned in the input's.

    Shape: [..., D] to [..., D].

    Reference: Zhang and Sennrich, 2019, arXiv:1910.07467.
    """

    def __init__(self, width: int, eps: float, *, affine: bool = True) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if affine else None

    def reset_parameters(self) -> None:
        """Set the weight to one."""
        if self.weight is not None:
            nn.init.ones_(self.weight)

    def forward(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        if is_fused("rms_norm", x):
            return rms_norm(x, self.weight, self.eps)
        weight = self.weight
        if weight is not None and _is_cpu_inference(x, weight):
            return plain_norm(x, weight, constant(self.width, x.dtype), constant(self.eps, x.dtype))
        if weight is None or weight.dtype == x.dtype:
            normed = F.rms_norm(x, (self.width,), weight, self.eps)
            return normed if normed.dtype == x.dtype else normed.to(x.dtype)  # autocast widens it
        wide = torch.promote_types(x.dtype, weight.dtype)
        return F.rms_norm(x.to(wide), (self.width,), weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, affine={self.weight is not None}"


def _is_cpu_inference(x: Tensor, weight: Tensor) -> bool:
    """True for plain CPU tensors of one dtype, float32 or float64, without gradients or compilation."""
    return (
        not torch.is_grad_enabled()
        and x.is_cpu
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and type(x) is Tensor
        and not torch.compiler.is_compiling()
    )


def plain_norm(x: Tensor, weight: Tensor, width: Tensor, eps: Tensor) -> Tensor:
    """Return `F.rms_norm` by fewer calls: on a CPU its overhead exceeds a decode step's matrix products."""
    # A sum and a quotient are what `mean` does, which makes a tensor of the width each time.
    mean = x.mul(x).sum(-1, keepdim=True).div_(width)
    return x.mul(mean.add_(eps).rsqrt_()).mul_(weight)


@functools.cache
def constant(value: float, dtype: torch.dtype) -> Tensor:
    """Return a number as a CPU tensor, which dispatches faster than a Python number."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


class RMSNormLayer(RMSNorm):
    """RMSNorm over the features, built from its config."""

    def __init__(self, config: RMSNormLayerConfig) -> None:
        super().__init__(config.d_model, config.eps, affine=config.elementwise_affine)
