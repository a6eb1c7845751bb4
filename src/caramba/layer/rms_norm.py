"""Root-mean-square normalisation."""

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
        if weight is None or weight.dtype == x.dtype:
            normed = F.rms_norm(x, (self.width,), weight, self.eps)
            return normed if normed.dtype == x.dtype else normed.to(x.dtype)  # autocast widens it
        wide = torch.promote_types(x.dtype, weight.dtype)
        return F.rms_norm(x.to(wide), (self.width,), weight.to(wide), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.width}, eps={self.eps}, affine={self.weight is not None}"


class RMSNormLayer(RMSNorm):
    """RMSNorm over the features, built from its config."""

    def __init__(self, config: RMSNormLayerConfig) -> None:
        super().__init__(config.d_model, config.eps, affine=config.elementwise_affine)
