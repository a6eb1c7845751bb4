"""Pass `norm_linear`: residual blocks of small-batch decode steps with norm and sum fused into the linear layers.

Where `small_batch_linear` has a kernel, a block of a norm and a layer runs as the layer's products alone: the time of
such a step is that of reading the weights, and of the kernels between them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents
from caramba.layer.fused_linear import linear_residual, norm_linear
from caramba.layer.quantized_linear import QuantizedLinear
from caramba.layer.rms_norm import RMSNormLayer
from caramba.layer.small_batch import SMALL_BATCH_ROWS, has_hooks, has_separate_norm, is_small_batch
from caramba.layer.swiglu import SwiGLULayer
from caramba.lower.replaced import Replaced
from caramba.model.topology import ResidualTopology
from caramba.ops import has_kernel
from caramba.ops.packed_int4 import WORDS
from caramba.ops.small_batch_linear import weight_fits
from caramba.ops.swiglu import swiglu


class SmallBatchResidual(ResidualTopology):
    """A residual block that runs small batches with a context fused, and anything else by its own forward.

    It takes the place of the block's class, so that modules, parameters and their names stay.
    """

    fused_dtypes: tuple[torch.dtype, ...]
    """Dtypes of x that the layer's weights allow."""

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        if (
            isinstance(ctx, (Context, DeviceContext))
            and is_small_batch(x)
            and x.dtype in self.fused_dtypes
            and (not has_separate_norm(x) or self.has_fused_linear())
        ):
            return self.fused_residual(x, ctx)
        return super().forward(x, ctx)

    def has_fused_linear(self) -> bool:
        """True if one linear reads the norm's output, which a norm in a launch of its own requires."""
        raise NotImplementedError

    def fused_residual(self, x: Tensor, ctx: Context | DeviceContext) -> Tensor:
        """Return x + layer(norm(x), ctx) of a small batch."""
        raise NotImplementedError


class SmallBatchAttention(SmallBatchResidual):
    """Attention behind a norm."""

    def has_fused_linear(self) -> bool:
        layer = self.layers[1]
        assert isinstance(layer, AttentionLayer)
        return getattr(layer.projection, "fused_linear", None) is not None

    def fused_residual(self, x: Tensor, ctx: Context | DeviceContext) -> Tensor:
        norm, layer = self.layers
        assert isinstance(norm, RMSNormLayer)
        assert isinstance(layer, AttentionLayer)
        return linear_residual(layer.out, layer.read(x, ctx, norm), x)


class SmallBatchSwiGLU(SmallBatchResidual):
    """A gated feed-forward network behind a norm: with fused weights two products and nothing else."""

    def has_fused_linear(self) -> bool:
        layer = self.layers[1]
        assert isinstance(layer, SwiGLULayer)
        return layer.fused_linear is not None

    def fused_residual(self, x: Tensor, ctx: Context | DeviceContext) -> Tensor:
        norm, layer = self.layers
        assert isinstance(norm, RMSNormLayer)
        assert isinstance(layer, SwiGLULayer)
        if layer.fused_linear is not None:
            hidden = norm_linear(layer.fused_linear, x, norm, gated=True)
        else:
            hidden = swiglu(norm_linear(layer.gate, x, norm), norm_linear(layer.up, x, norm))
        return linear_residual(layer.down, hidden, x)


def fuse_norm_linear(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower residual blocks whose norm and layer are unmodified; return them.

    A block stays plain if its norm, layer or a linear of it has hooks, an adapter, or weights that are sharded or of
    a format without a kernel, and on devices without the kernel.
    """
    return [
        lower_block(block, kind, dtypes)
        for block in model.modules()
        if type(block) is ResidualTopology
        for kind, linears in [match_block(block)]
        if kind is not None and (dtypes := fusible_dtypes(linears))
    ]


def lower_block(
    block: ResidualTopology, kind: type[SmallBatchResidual], dtypes: tuple[torch.dtype, ...]
) -> Replaced:
    """Give a block its class."""
    block.__class__ = kind
    block.__dict__["fused_dtypes"] = dtypes

    def restore() -> None:
        block.__class__ = ResidualTopology
        del block.__dict__["fused_dtypes"]

    return Replaced(block, restore)


def match_block(
    block: ResidualTopology,
) -> tuple[type[SmallBatchResidual] | None, tuple[nn.Module, ...]]:
    """Return the class that a block may take, or None, and the linear layers that it then runs fused."""
    if len(block.layers) != 2 or any(has_hooks(node) for node in block.layers):
        return None, ()
    norm, layer = block.layers
    # Exact types: tensor parallelism changes the class of a layer.
    if type(norm) is RMSNormLayer and type(layer) is SwiGLULayer:
        return SmallBatchSwiGLU, (layer.gate, layer.up, layer.down)
    if type(norm) is RMSNormLayer and type(layer) is AttentionLayer:
        readers = layer.projection.readers()
        if readers is not None and not has_hooks(layer.projection):
            return SmallBatchAttention, (*readers, layer.out)
    return None, ()


def fusible_dtypes(layers: Iterable[nn.Module]) -> tuple[torch.dtype, ...]:
    """Return the dtypes of a small batch that the kernel takes with these layers, in the order of the table."""
    every = tuple(layers)
    dtypes = tuple(dtype for dtype in SMALL_BATCH_ROWS if are_unmodified(every, dtype))
    weights = (weight for layer in every for weight in layer.parameters())
    return dtypes if all(has_kernel("small_batch_linear", weight) for weight in weights) else ()


def are_unmodified(layers: Iterable[nn.Module | None], dtype: torch.dtype) -> bool:
    """True if linear layers are plain weights of a dtype or 8- or 4-bit `QuantizedLinear`.

    Layers quantised otherwise, sharded, hooked or with an adapter are not.
    """
    for layer in layers:
        if type(layer) is nn.Linear:
            weight_dtypes: tuple[torch.dtype, ...] = (dtype,)
        elif type(layer) is QuantizedLinear and layer.reduce is None:
            weight_dtypes = (torch.int8, WORDS)
        else:
            return False
        if has_hooks(layer):
            return False
        for one, expected in ((layer.weight, weight_dtypes), (layer.bias, (dtype,))):
            if one is not None and (type(one) is not nn.Parameter or one.dtype not in expected):
                return False
        if not weight_fits(layer.weight):
            return False
    return True
