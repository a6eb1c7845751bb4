"""The op `caramba::cross_entropy_rows`: the losses of rows of logits, and their gradient in the logits' place."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op


def cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    z_loss: float = 0.0,
    writes: bool = True,
) -> None:
    """Write each row's loss, and with `writes` its gradient over the logits:

        loss = lse(s x) - s x[t] + c lse(s x)^2
        dx = s [(1 + 2 c lse) softmax(s x) - onehot(t)]

    Both are 0 in a row whose target is `ignore_index`, whatever it contains, and NaN where the target is outside the
    row; with TRITON_DEBUG=1 the Triton kernel stops there.

    Shape: logits [R, V] with stride 1 within a row, targets int64 [R], losses [R] in fp32 (float64 for logits in
    float64, which always run the reference).

    Raises:
        ConfigError: shapes or dtypes that do not fit.
    """
    _check(logits, targets, losses)
    if logits.dtype == torch.float64:
        return reference_cross_entropy_rows(logits, targets, losses, ignore_index, scale, z_loss, writes)
    return torch.ops.caramba.cross_entropy_rows.default(
        logits, targets, losses, ignore_index, scale, z_loss, writes
    )


@caramba_op(
    "cross_entropy_rows",
    fake=lambda logits, targets, losses, *_: _check(logits, targets, losses),
    mutates=("logits", "losses"),
)
def reference_cross_entropy_rows(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    ignore_index: int,
    scale: float,
    z_loss: float,
    writes: bool,
) -> None:
    """Compute `cross_entropy_rows` in plain PyTorch, in the dtype of the losses."""
    _check(logits, targets, losses)
    counts = targets != ignore_index
    inside = (targets >= 0) & (targets < logits.shape[-1])
    index = torch.where(inside, targets, 0)[:, None]
    z = logits.to(losses.dtype, copy=True).mul_(scale)
    lse = z.logsumexp(dim=-1, keepdim=True)
    loss = lse - z.gather(-1, index) + z_loss * lse.square()
    loss = torch.where(inside[:, None], loss, float("nan"))
    losses.copy_(torch.where(counts, loss.squeeze(-1), 0.0))
    if writes:
        z.sub_(lse).exp_().mul_(1.0 + 2.0 * z_loss * lse)
        z.scatter_add_(-1, index, torch.full_like(lse, -1.0))
        z.masked_fill_(~inside[:, None], float("nan"))
        logits.copy_(z.mul_(scale).masked_fill_(~counts[:, None], 0.0))


def _check(logits: Tensor, targets: Tensor, losses: Tensor) -> None:
    if logits.dim() != 2 or targets.shape != logits.shape[:1] or losses.shape != targets.shape:
        raise ConfigError(
            f"cross_entropy_rows: logits {tuple(logits.shape)}, targets {tuple(targets.shape)} and losses "
            f"{tuple(losses.shape)}, expected [R, V], [R] and [R]"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    if targets.dtype != torch.int64 or not logits.is_floating_point() or losses.dtype != wide:
        raise ConfigError(
            f"cross_entropy_rows: logits are {logits.dtype}, targets {targets.dtype} and losses {losses.dtype}, "
            f"expected floating point, int64 and {wide}"
        )
    if not logits.device == targets.device == losses.device or not logits.shape[1]:
        raise ConfigError(
            f"cross_entropy_rows: logits {tuple(logits.shape)} are on {logits.device}, targets on {targets.device} and "
            f"losses on {losses.device}, expected one device and a class at least"
        )
    if not losses.is_contiguous() or (logits.stride(1) != 1 and logits.numel()):
        raise ConfigError(
            f"cross_entropy_rows: logits have strides {logits.stride()} and losses {losses.stride()}, "
            "expected 1 within a row of logits and contiguous losses"
        )
