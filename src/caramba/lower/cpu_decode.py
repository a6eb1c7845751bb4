"""Pass `cpu_decode`: residual blocks of one-token steps with fewer Python and dispatcher calls.

For a small model the time of such a step is call overhead, not reading weights. No module of a lowered model may be
replaced, so the checks of a block run once, and a step reads only what is stored here.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents
from caramba.layer.projection import Projection, StandardProjection
from caramba.layer.rms_norm import RMSNormLayer
from caramba.layer.rope import apply_rope_halves, rotate
from caramba.layer.swiglu import SwiGLULayer
from caramba.lower.fuse_linears import FusedGateUp, FusedLinear, FusedQkv, is_unmodified_linear
from caramba.lower.lowering import Replaced, has_hooks, is_unmodified, plain_class, replace_class
from caramba.model.topology import NestedTopology, ResidualTopology, StackedTopology, Topology
from caramba.ops import has_kernel
from caramba.ops.backend import WIDE


class CpuDecodeStep(Protocol):
    """A module's forward for one token per sequence. Shape: rows [B, M] to [B, M]."""

    dtype: torch.dtype

    def __call__(self, x: Tensor, ctx: Context) -> Tensor: ...


class CpuDecode(Topology):
    """A topology that runs one cached token by its step, and anything else by its own forward.

    It takes the place of the topology's class, so that modules, parameters and their names stay.
    """

    step: CpuDecodeStep

    def forward(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        if isinstance(ctx, Context) and takes_step(self.step, x):
            return self.step(x.view(x.shape[0], -1), ctx).view(x.shape)
        return super().forward(x, ctx)


LOWERED = (NestedTopology, ResidualTopology, StackedTopology)


def cpu_decode(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower the outermost topologies that have a step; return them.

    A module with hooks or a forward of its own is not lowered, nor what contains it. None is where forwards are
    compiled.
    """
    if is_compiled or isinstance(model, CpuDecode):
        return []
    found = decode_step(model) if plain_class(model) in LOWERED and not has_hooks(model) else None
    if found is None:
        return [one for child in model.children() for one in cpu_decode(child, is_compiled=False)]
    return [replace_class(model, CpuDecode, step=found)]


def decode_step(node: nn.Module) -> CpuDecodeStep | None:
    """Return a step of a node, or None if it or a part is replaced, quantised, hooked, adapted or sharded."""
    # Exact classes: a subclass overrides forward.
    kind = plain_class(node)
    if isinstance(node, ResidualTopology) and kind is ResidualTopology:
        return _residual_step(node.layers)
    if kind is StackedTopology or (isinstance(node, NestedTopology) and kind is NestedTopology and node.runs is None):
        assert isinstance(node, Topology)
        steps: list[CpuDecodeStep] = []
        for part in node.layers:
            found = None if has_hooks(part) else decode_step(part)
            if found is None:
                return None
            steps.append(found)
        return Chain(steps) if steps else None
    return NormStep.of(node)


def _residual_step(nodes: nn.ModuleList) -> CpuDecodeStep | None:
    """Return a decode step x + layer(norm(x)) for a residual block's nodes, or None.

    None on other devices, in 16 bits, with kernels, and if a node is replaced, quantised, hooked, adapted or has an
    overridden forward.
    """
    norm, layer = nodes[0], nodes[-1]
    if len(nodes) != 2 or not _is_unmodified_norm(norm) or has_hooks(norm):
        return None
    # Exact classes: tensor parallelism changes the class of a layer.
    if (
        isinstance(layer, AttentionLayer)
        and is_unmodified(layer, AttentionLayer)
        and _is_unmodified_output(layer.out, norm)
        and not has_hooks(layer.projection)
    ):
        return _Attention(norm, layer)
    if (
        isinstance(layer, FusedGateUp)
        and is_unmodified(layer, SwiGLULayer)
        and layer.fused_linear.scale is None
        and _is_unmodified_output(layer.down, norm)
    ):
        return _FeedForward(norm, layer, layer.fused_linear)
    return None


def _is_unmodified_norm(norm: nn.Module) -> TypeGuard[RMSNormLayer]:
    if type(norm) is not RMSNormLayer or type(norm.weight) is not nn.Parameter:
        return False
    weight = norm.weight
    kernels = ("dba_decode", "rms_norm", "small_batch_linear", "swiglu")
    return weight.is_cpu and weight.dtype in WIDE and not any(has_kernel(op, weight) for op in kernels)


def _is_unmodified_output(layer: nn.Module, norm: RMSNormLayer) -> bool:
    assert norm.weight is not None
    return is_unmodified_linear(layer) and layer.weight.is_cpu and layer.weight.dtype == norm.weight.dtype


def takes_step(step: CpuDecodeStep, x: Tensor) -> bool:
    """True if x is one token per sequence, a plain tensor without gradients."""
    return (
        x.shape[1] == 1
        and type(x) is Tensor
        and x.dtype == step.dtype
        and x.is_contiguous()
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


class Chain:
    """Run steps in order."""

    def __init__(self, steps: Sequence[CpuDecodeStep]) -> None:
        self.steps = tuple(steps)
        self.dtype = self.steps[0].dtype

    def __call__(self, x: Tensor, ctx: Context) -> Tensor:
        for step in self.steps:
            x = step(x, ctx)
        return x


class NormStep:
    """Decode step of an RMSNorm."""

    def __init__(self, norm: RMSNormLayer) -> None:
        assert norm.weight is not None
        self.weight, self.dtype = norm.weight.detach(), norm.weight.dtype
        self.width, self.eps = constant(norm.width, self.dtype), constant(norm.eps, self.dtype)

    @classmethod
    def of(cls, norm: nn.Module) -> "NormStep | None":
        """Return the step of an unmodified RMSNorm on a CPU, None for any other module."""
        return cls(norm) if _is_unmodified_norm(norm) else None

    def __call__(self, x: Tensor, ctx: Context | None = None) -> Tensor:
        return plain_norm(x, self.weight, self.width, self.eps)


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


class _Linear:
    """W x + b of rows, or that and a residual. Shape: [B, M] (and [B, N]) to [B, N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.transposed = weight.detach().t()
        self.bias = None if bias is None else bias.detach()

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x, self.transposed)
        return torch.addmm(self.bias, x, self.transposed)

    def add_to(self, x: Tensor, residual: Tensor) -> Tensor:
        if self.bias is None:
            return torch.addmm(residual, x, self.transposed)
        return torch.addmm(self.bias, x, self.transposed).add_(residual)


class _FeedForward:
    def __init__(self, norm: RMSNormLayer, layer: SwiGLULayer, fused_linear: FusedLinear) -> None:
        self.dtype = layer.down.weight.dtype
        self.norm, self.widths = NormStep(norm), fused_linear.widths
        self.up = _Linear(fused_linear.weight, fused_linear.bias)
        self.down = _Linear(layer.down.weight, layer.down.bias)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor:
        gate, up = self.up(self.norm(x)).split_with_sizes(self.widths, -1)
        return self.down.add_to(F.silu(gate).mul_(up), x)


class _Attention:
    def __init__(self, norm: RMSNormLayer, layer: AttentionLayer) -> None:
        self.dtype, self.heads = layer.out.weight.dtype, (-1, layer.out.weight.shape[1])
        self.norm, self.out = NormStep(norm), _Linear(layer.out.weight, layer.out.bias)
        self.read, self.attend = _reader(layer.projection), _attend(layer)

    def __call__(self, x: Tensor, ctx: Context) -> Tensor:
        q, streams = self.read(self.norm(x), ctx.position)
        heads = self.attend(q, ctx.next_cache().append(streams))
        return self.out.add_to(heads.reshape(self.heads), x)


def _attend(layer: AttentionLayer) -> Callable[[Tensor, Mapping[str, Tensor]], Tensor]:
    projection, score, null = layer.projection, layer.score, layer.null()
    if is_unmodified(projection, StandardProjection) and not has_hooks(score):
        return lambda q, streams: score.forward(q, streams["k"], streams["v"], null)
    return lambda q, streams: projection.attend(q, streams, score, null)


def _reader(projection: Projection) -> Callable[[Tensor, int], tuple[Tensor, dict[str, Tensor]]]:
    if isinstance(projection, FusedQkv) and plain_class(projection) is StandardProjection:
        fused = projection.fused_linear
        if isinstance(projection.q_norm, nn.Identity) and fused.scale is None:
            return _FusedQkv(projection, fused)
    return lambda rows, position: projection.forward(rows.unsqueeze(1), position)


class _FusedQkv:
    """Queries, keys and values from one fused linear; queries and keys are rotated as heads of one tensor."""

    def __init__(self, projection: StandardProjection, fused_linear: FusedLinear) -> None:
        dims, self.projection = projection.dims, projection
        self.product = _Linear(fused_linear.weight, fused_linear.bias)
        self.heads = [dims.n_heads, dims.n_kv_heads]
        n_rotated = sum(self.heads)
        self.widths = [n_rotated * dims.qk, dims.n_kv_heads * dims.v]
        self.qk_shape, self.v_shape = (-1, n_rotated, 1, dims.qk), (-1, dims.n_kv_heads, 1, dims.v)
        self.rope, self.halves_shape = projection.rope, (-1, n_rotated, 1, 2, dims.qk // 2)
        self.scale = constant(projection.scale, fused_linear.weight.dtype) if projection.temperature is None else None

    def __call__(self, rows: Tensor, position: int) -> tuple[Tensor, dict[str, Tensor]]:
        qk, v = self.product(rows).split_with_sizes(self.widths, -1)
        if self.rope is None:
            qk = qk.view(self.qk_shape)
        elif (angles := self.rope.cached_cos_sin(position, 1, rows.device)) is None:
            qk = rotate(qk.view(self.qk_shape), *self.rope(position, 1, rows.device))
        else:
            qk = apply_rope_halves(qk.view(self.halves_shape), *angles).view(self.qk_shape)
        q, k = qk.split_with_sizes(self.heads, 1)
        q = self.projection.scale_queries(q, q.dtype) if self.scale is None else q.mul(self.scale)
        return q, {"k": k, "v": v.view(self.v_shape)}
