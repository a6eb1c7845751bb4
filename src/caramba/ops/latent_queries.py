"""The op `caramba::latent_queries`: the queries of latent attention from those of its heads, forward and backward."""

from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, has_kernel, refuse_tangents, upcast
from caramba.ops.rope import rotate_pairs

HALF = (torch.float16, torch.bfloat16)
WIDEST_HEAD, WIDEST_GEO = 128, 256


def latent_queries(q: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """Return scale [q_h, RoPE(q_h G_h)] for every head h, sums and angles in at least fp32, rounded once.

    G_h is rounded to q's dtype before the product, as under autocast; its gradient is summed in at least fp32 and
    comes in its own dtype. The tables get no gradient.

    Shape: q [B, T, H, D], geo_map [H, D, G], cos and sin [1, T, G/2] or [B, 1, T, G/2]; returns [B, T, H, D + G],
    contiguous, in q's dtype.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit, or tables that require gradients.
    """
    check_queries("latent_queries", q, geo_map, cos, sin)
    refuse_tangents("latent_queries", q, geo_map)
    if has_kernel("latent_queries", q) and not has_narrow_queries(q.dtype, q.shape[-1], geo_map.shape[-1]):
        return reference_latent_queries(q, geo_map, cos, sin, scale)
    return torch.ops.caramba.latent_queries.default(q, geo_map, cos, sin, scale)


def has_narrow_queries(dtype: torch.dtype, head_dim: int, geo_dim: int) -> bool:
    """Whether kernels of the op take it: in 16 bits, at widths that their tiles hold."""
    return dtype in HALF and head_dim <= WIDEST_HEAD and 0 < geo_dim <= WIDEST_GEO


def check_queries(op: str, q: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Refuse what an op of the queries of heads does not take.

    Raises:
        ConfigError: shapes, dtypes or devices that do not fit, or tables that require gradients.
    """
    if q.dim() != 4 or not q.is_floating_point():
        raise ConfigError(f"{op}: q is {q.dtype} of shape {tuple(q.shape)}, expected floating [B, T, H, D]")
    batch, n_tokens, heads, width = q.shape
    is_map = geo_map.dim() == 3 and geo_map.shape[:2] == (heads, width) and geo_map.is_floating_point()
    if not is_map or geo_map.shape[2] % 2:
        raise ConfigError(
            f"{op}: geo_map is {geo_map.dtype} of shape {tuple(geo_map.shape)}, expected floating "
            f"[{heads}, {width}, G] with even G"
        )
    table = (n_tokens, geo_map.shape[2] // 2)
    is_table = tuple(cos.shape) in ((1, *table), (batch, 1, *table)) and cos.is_floating_point()
    if not is_table or (sin.shape, sin.dtype) != (cos.shape, cos.dtype):
        raise ConfigError(
            f"{op}: cos is {cos.dtype} {tuple(cos.shape)} and sin {sin.dtype} {tuple(sin.shape)}, expected both "
            f"floating {(1, *table)} or {(batch, 1, *table)}"
        )
    if len({x.device for x in (q, geo_map, cos, sin)}) > 1:
        raise ConfigError(
            f"{op}: q is on {q.device}, geo_map on {geo_map.device}, cos on {cos.device}, sin on "
            f"{sin.device}; expected one device"
        )
    if cos.requires_grad or sin.requires_grad:
        raise ConfigError(f"{op}: cos and sin require gradients, which this op does not give; detach them")


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_q, grad_map = torch.ops.caramba.latent_queries_backward.default(grad, *ctx.saved_tensors, ctx.scale)
    return grad_q, grad_map, None, None, None


@caramba_op(
    "latent_queries",
    fake=lambda q, geo_map, *_: q.new_empty((*q.shape[:-1], q.shape[-1] + geo_map.shape[-1])),
    setup=_setup,
    backward=_backward,
    is_eager=False,
)
def reference_latent_queries(q: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float) -> Tensor:
    """Compute the op in plain PyTorch."""
    wide = upcast(q)
    geo = torch.einsum("bthd,hdg->bthg", wide, geo_map.to(q.dtype).to(wide.dtype))
    return (torch.cat((wide, _turned(geo, cos, sin)), dim=-1) * scale).to(q.dtype).contiguous()


@caramba_op(
    "latent_queries_backward",
    fake=lambda grad, q, geo_map, *_: (q.new_empty(q.shape), geo_map.new_empty(geo_map.shape)),
)
def reference_latent_queries_backward(
    grad: Tensor, q: Tensor, geo_map: Tensor, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of q and of geo_map in plain PyTorch."""
    wide = upcast(grad) * scale
    sem, geo = wide.split((q.shape[-1], geo_map.shape[-1]), dim=-1)
    geo = _turned(geo, cos, -sin)
    grad_q = sem + torch.einsum("bthg,hdg->bthd", geo, geo_map.to(q.dtype).to(wide.dtype))
    grad_map = torch.einsum("bthd,bthg->hdg", q.to(wide.dtype), geo)
    return grad_q.to(q.dtype).contiguous(), grad_map.to(geo_map.dtype).contiguous()


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (p, p + G/2) of wide x [B, T, H, G]."""
    cos, sin = (table.to(x.dtype).squeeze(-3).unsqueeze(-2) for table in (cos, sin))
    return rotate_pairs(x, cos, sin)
