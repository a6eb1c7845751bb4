"""Passes over small batches: the norm before linear layers, sums after them and the head by `small_batch_linear`.

Where `small_batch_linear` has a kernel, a block of a norm and a layer runs as the layer's products alone: the time of
such a step is that of reading the weights, and of the kernels between them.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents
from caramba.layer.quantized_linear import QuantizedLinear
from caramba.layer.rms_norm import RMSNorm, RMSNormLayer
from caramba.layer.rope import RotaryEmbedding
from caramba.layer.swiglu import SwiGLULayer
from caramba.lower.lowering import (
    Replaced,
    has_hooks,
    is_unmodified,
    plain_class,
    replace_class,
    replace_each,
)
from caramba.model.model import Head, TiedHead
from caramba.model.topology import ResidualTopology
from caramba.ops import has_kernel
from caramba.ops.latent_queries import HALF
from caramba.ops.small_batch_linear import (
    SMALL_BATCH_ROWS,
    WORDS,
    is_small_batch,
    rows_fit,
    small_batch_linear,
    weight_fits,
)


class PreNorm(NamedTuple):
    """Rows x [..., M] and the norm that belongs before the linear layers that read them.

    A textbook forward takes it in the place of norm(x); a layer that was not lowered to take it raises.
    """

    x: Tensor
    norm: RMSNorm

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device


class LinearWeights(Protocol):
    """What a product needs of a linear layer, fused or not."""

    @property
    def weight(self) -> Any: ...

    @property
    def bias(self) -> Any: ...


def norm_linear(layer: LinearWeights, rows: PreNorm, *, gated: bool = False) -> Tensor:
    """Return layer(norm(x)), or silu(gate) * up of a fused layer if `gated`. Shape: [..., M] to [..., N]."""
    return small_batch_linear(
        rows.x,
        layer.weight,
        layer.bias,
        scale=getattr(layer, "scale", None),
        norm=rows.norm.weight,
        eps=rows.norm.eps,
        gated=gated,
    )


def linear_residual(layer: LinearWeights, x: Tensor, residual: Tensor) -> Tensor:
    """Return residual + layer(x). Shape: [..., M] and [..., N] to [..., N]."""
    scale = getattr(layer, "scale", None)
    return small_batch_linear(x, layer.weight, layer.bias, scale=scale, residual=residual)


class NormLinear(nn.Module):
    """A linear layer, quantised or not, that normalises a `PreNorm` as it reads it."""

    weight: Any
    bias: Any

    def forward(self, input: Tensor, *rest: object) -> Tensor:
        if isinstance(input, PreNorm):
            return norm_linear(self, input)
        return super().forward(input, *rest)  # pyright: ignore[reportAttributeAccessIssue]


class SmallBatchResidual(ResidualTopology):
    """A residual block that runs small batches with a context fused, and anything else by its own forward.

    It takes the place of the block's class, so that modules, parameters and their names stay.
    """

    fused_dtypes: tuple[torch.dtype, ...]
    """Dtypes of x that the layer's weights allow."""

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        norm, layer = self.layers
        assert isinstance(norm, RMSNormLayer)
        is_swiglu = isinstance(layer, SwiGLULayer)
        has_one_reader = hasattr(layer if is_swiglu else layer.projection, "fused_linear")
        if (
            not isinstance(ctx, (Context, DeviceContext))
            or not is_small_batch(x)
            or x.dtype not in self.fused_dtypes
            or (has_separate_norm(x) and not has_one_reader)
        ):
            return super().forward(x, ctx)
        rows = PreNorm(x, norm)
        if is_swiglu:  # with fused weights two products and nothing else
            return linear_residual(layer.down, layer.hidden(rows), x)  # pyright: ignore[reportArgumentType]
        assert isinstance(layer, AttentionLayer)
        return linear_residual(layer.out, layer.read(rows, ctx), x)  # pyright: ignore[reportArgumentType]


def fuse_norm_linear(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower residual blocks whose norm and layer are unmodified; return them.

    A block stays plain if its norm, layer or a linear of it has hooks, an adapter, or weights that are sharded or of
    a format without a kernel, and on devices without the kernel.
    """
    replaced: list[Replaced] = []
    for block in model.modules():
        if not isinstance(block, ResidualTopology) or not is_unmodified(block, ResidualTopology):
            continue
        readers, output = match_block(block)
        if readers and (dtypes := fusible_dtypes((*readers, output))):
            replaced += [
                replace_class(block, SmallBatchResidual, fused_dtypes=dtypes),
                *(replace_class(reader, NormLinear) for reader in readers),
            ]
    return replaced


def match_block(block: ResidualTopology) -> tuple[tuple[nn.Module, ...], nn.Module]:
    """Return the linear layers after a block's norm, none where they cannot fuse, and their layer."""
    if isinstance(block, SmallBatchResidual) or len(block.layers) != 2:
        return (), block
    norm, layer = block.layers
    # Exact classes: tensor parallelism changes the class of a layer.
    if not is_unmodified(norm, RMSNormLayer):
        return (), block
    if isinstance(layer, SwiGLULayer) and is_unmodified(layer, SwiGLULayer):
        return (layer.gate, layer.up), layer.down
    if isinstance(layer, AttentionLayer) and is_unmodified(layer, AttentionLayer):
        return readers_of(layer.projection), layer.out
    return (), block


def readers_of(projection: nn.Module) -> tuple[nn.Module, ...]:
    """Return the linear layers of a projection that read x, none if another op reads it too."""
    others = (getattr(projection, name, None) for name in ("gate_dynamic", "first"))
    if has_hooks(projection) or any(other is not None for other in others):
        return ()
    rest = (RMSNorm, RotaryEmbedding, nn.Identity)
    return tuple(layer for layer in projection.children() if not isinstance(layer, rest))


def has_separate_norm(x: Tensor) -> bool:
    """True if the small-batch kernel runs the norm as a separate launch.

    Then one fused linear should read the norm's output, not several.
    """
    return x.dtype in HALF and x.numel() > x.shape[-1]


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
