"""Pass `fuse_linears`: fused QKV and gate-up, the weights of linear layers with one input in one allocation."""

from collections.abc import Sequence
from typing import NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from caramba.layer.latent import LatentProjection
from caramba.layer.projection import Angles, StandardProjection
from caramba.layer.quantized_linear import QuantizedLinear, linear
from caramba.layer.swiglu import SwiGLULayer
from caramba.lower.lowering import Replaced, has_hooks, replace_class
from caramba.lower.norm_linear import PreNorm, norm_linear
from caramba.ops import has_kernel
from caramba.ops.dba_decode import MAX_QUERIES
from caramba.ops.rope import rope_qkv
from caramba.ops.swiglu import swiglu


class FusedLinear(NamedTuple):
    """Concatenated weights and biases of linear layers that share one input.

    Attributes:
        weight: [sum of N_i, M]; integer codes where `scale` is set.
        bias: [sum of N_i] or None.
        widths: output features N_i of each layer.
        scale: dequantisation scales, as in `QuantizedLinear`, or None.
    """

    weight: Tensor
    bias: Tensor | None
    widths: list[int]
    scale: Tensor | None = None

    def product(self, x: Tensor) -> Tensor:
        """Return the outputs W_i x + b_i of all layers, concatenated. Shape: [..., M] to [..., sum of N_i]."""
        if isinstance(x, PreNorm):
            return norm_linear(self, x)
        return linear(x, self.weight, self.bias, self.scale)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return W_i x + b_i of every layer. Shape: [..., M] to [..., N_i] each."""
        return self.product(x).split_with_sizes(self.widths, dim=-1)

    def takes(self, x: Tensor) -> bool:
        """True if a forward uses parts of the product: of a small batch before its norm, or without gradients.

        Not eager on CUDA, where kernels read contiguous rows and would copy the parts.
        """
        if isinstance(x, PreNorm):
            return True
        return not torch.is_grad_enabled() and uses_fused_linears(x.device, is_compiled=torch.compiler.is_compiling())

    def prefill(self, x: Tensor) -> Tensor | None:
        """Return the unsplit product of an eager prefill without gradients, for a kernel that reads it; else None.

        Shape: x [B, T, M] to [B, T, sum of N_i].
        """
        if isinstance(x, PreNorm) or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        return self.product(x) if x.dim() == 3 and x.shape[1] > MAX_QUERIES else None


class PackedQkv(StandardProjection):
    """A projection whose queries, keys and values of one product are rotated and split by one kernel."""

    def project_packed(self, x: Tensor) -> Tensor | None:
        """Return queries, keys and values as one tensor [B, T, sum of N_i], or None for separate products."""
        return None

    def forward(
        self, x: Tensor, offset: int | Tensor = 0, rows: Tensor | None = None, angles: Angles = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        # A compiler would compute each of the three gradients at every element of the fused gradient.
        is_plain = self.rope is not None and isinstance(self.q_norm, nn.Identity) and self.temperature is None
        is_whole = rows is None and angles is None and self.dims.v == self.dims.qk
        together = self.project_packed(x) if is_plain and is_whole and has_kernel("rope_qkv", x) else None
        if together is None or self.rope is None:
            return super().forward(x, offset, rows, angles)
        cos, sin = self.rope(offset, together.shape[1], together.device)
        q, k, v = rope_qkv(together, cos, sin, self.dims.n_heads, self.dims.n_kv_heads, self.scale)
        return q, {"k": k, "v": v}


class FusedQkv(PackedQkv):
    """A projection by one product."""

    fused_linear: FusedLinear

    def project_packed(self, x: Tensor) -> Tensor | None:
        together = None if self.fused_linear.takes(x) else self.fused_linear.prefill(x)
        return super().project_packed(x) if together is None else together

    def linears(self, x: Tensor, rows: Tensor | None) -> tuple[Tensor, ...]:
        fused = self.fused_linear
        return fused(x) if rows is None and fused.takes(x) else super().linears(x, rows)


class PackedGateUp(SwiGLULayer):
    """A gated network whose gate and up of one product go through one kernel."""

    def project_packed(self, x: Tensor) -> Tensor | None:
        """Return gate and up as one tensor [..., 2 d_ff], or None for separate products."""
        return None

    def hidden(self, x: Tensor) -> Tensor:
        # A compiler joins the gradients of both halves by computing either at every element of the pair.
        packed = self.project_packed(x) if has_kernel("swiglu_packed", x) else None
        return super().hidden(x) if packed is None else swiglu(packed)


class FusedGateUp(PackedGateUp):
    """A gated network whose gate and up are one product."""

    fused_linear: FusedLinear

    def project_packed(self, x: Tensor) -> Tensor | None:
        together = self.fused_linear.prefill(x)
        return super().project_packed(x) if together is None else together

    def hidden(self, x: Tensor) -> Tensor:
        if isinstance(x, PreNorm):
            return norm_linear(self.fused_linear, x, gated=True)
        return super().hidden(x)

    def linears(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.fused_linear(x) if self.fused_linear.takes(x) else super().linears(x)


class FusedLatent(LatentProjection):
    """A latent projection by one product."""

    fused_linear: FusedLinear

    def linears(self, x: Tensor, asking: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if asking is not x or not self.fused_linear.takes(x):
            return super().linears(x, asking)
        return self.by_one_product(x)

    def by_one_product(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return `linears` as views of the product."""
        q, c, k_geo = self.fused_linear(x)
        return q, c if self.c_norm is None else self.c_norm(c), k_geo


FUSIBLE: dict[type[nn.Module], tuple[tuple[str, ...], type[nn.Module]]] = {
    StandardProjection: (("q", "k", "v"), FusedQkv),
    SwiGLULayer: (("gate", "up"), FusedGateUp),
    LatentProjection: (("q", "c", "k_geo"), FusedLatent),
}
"""Linear layers of one input by the class that owns them, in the order of their output features."""


def fuse_linears(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Fuse linear layers that share an input; return the modules that own them.

    Weights and biases move once into one allocation, and each parameter becomes a view of it: no copy is kept, names
    and values do not change, and an optimiser still updates the parameters in place. CUDA graphs captured under one
    lowering stay valid under the next, because the memory is reused. Layers without a bias get zeros if another has
    one.

    Replaced, sharded, hooked or mismatched layers are not fused. `is_compiled` is True for compiled forwards, which
    use the fused GEMM on CUDA too; eager CUDA forwards use it only through the small-batch kernel.
    """
    replaced: list[Replaced] = []
    for module in model.modules():
        for kind, (names, fast) in FUSIBLE.items():
            if not isinstance(module, kind) or isinstance(module, fast) or has_hooks(module):
                continue
            fused = fuse([module.get_submodule(name) for name in names], is_compiled=is_compiled)
            if fused is not None:
                replaced.append(replace_class(module, fast, fused_linear=fused))
    return replaced


def uses_fused_linears(device: torch.device, *, is_compiled: bool) -> bool:
    """True if forwards on a device use fused linears."""
    return is_compiled or device.type != "cuda"


def fuse(layers: Sequence[nn.Module], *, is_compiled: bool) -> FusedLinear | None:
    """Return linear layers as one, or None if they do not go together or no forward would use it."""
    plain = [layer for layer in layers if is_unmodified_linear(layer)]
    first = plain[0].weight if plain else None
    if first is None or len(plain) < len(layers):
        return None
    is_used = uses_fused_linears(first.device, is_compiled=is_compiled)
    if not is_used and not has_kernel("small_batch_linear", first):
        return None
    like = (first.dtype, first.device, first.shape[1], first.requires_grad)
    biases = [layer.bias for layer in plain if layer.bias is not None]
    for layer in plain:
        weight = layer.weight
        if (weight.dtype, weight.device, weight.shape[1], weight.requires_grad) != like:
            return None
    if any(bias.dtype != biases[0].dtype for bias in biases):
        return None
    scales = [layer.scale for layer in plain if isinstance(layer, QuantizedLinear)]
    if any(scale.shape[1:] != scales[0].shape[1:] for scale in scales):
        return None
    # Tensors created under inference_mode could not be trained later.
    with torch.inference_mode(False), torch.no_grad():
        weight = _concatenate([layer.weight for layer in plain])
        bias = _concatenate([_bias_of(layer, biases[0].dtype) for layer in plain]) if biases else None
        scale = _concatenate(scales) if scales else None
    return FusedLinear(weight, bias, [layer.weight.shape[0] for layer in plain], scale)


_zeros: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()


def _bias_of(layer: nn.Linear | QuantizedLinear, dtype: torch.dtype) -> Tensor:
    """Return a layer's bias, or zeros cached for the layer, so that they are allocated once."""
    if layer.bias is not None:
        return layer.bias
    weight, zeros = layer.weight, _zeros.get(layer)
    like = (weight.shape[0], dtype, weight.device)
    if zeros is None or (zeros.shape[0], zeros.dtype, zeros.device) != like:
        zeros = _zeros[layer] = weight.new_zeros(weight.shape[0], dtype=dtype)
    return zeros


def is_unmodified_linear(layer: nn.Module) -> TypeGuard[nn.Linear | QuantizedLinear]:
    """True for an `nn.Linear` or `QuantizedLinear` without hooks, adapters, sharding or an overridden forward."""
    if type(layer) is QuantizedLinear:
        alike = layer.reduce is None
    elif type(layer) is nn.Linear:
        alike = layer.bias is None or layer.bias.dtype == layer.weight.dtype
    else:
        return False
    device = layer.weight.device
    return (
        alike
        and not has_hooks(layer)
        and all(
            type(one) is nn.Parameter and one.device == device and not one.is_meta and not one.is_inference()
            for one in layer.parameters()
        )
    )


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Return parts [N_i, ...] as one tensor that shares their memory; move parts into one allocation if needed."""
    first = parts[0]
    shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
    place, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.untyped_storage().data_ptr() != storage or part.data_ptr() != place:
            break
        place += part.nbytes
    else:
        return first.detach().as_strided(shape, first.stride(), first.storage_offset())
    together = torch.cat([part.detach() for part in parts])
    for part, moved in zip(parts, together.split([part.shape[0] for part in parts]), strict=True):
        part.data = moved
    return together
