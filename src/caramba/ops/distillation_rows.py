"""The op `caramba::distillation_rows`: KL and cross-entropy of rows of logits, and their gradient in place."""

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op


def distillation_rows(
    logits: Tensor,
    teacher: Tensor,
    targets: Tensor,
    kl: Tensor,
    ce: Tensor,
    *,
    ignore_index: int = -100,
    temperature: float = 1.0,
    kl_weight: float = 1.0,
    writes: bool = True,
) -> None:
    """Write each row's T^2 KL(teacher || student) and cross-entropy; with `writes` their gradient over the logits.

    With p = softmax(y / T) of the teacher's logits y and w = `kl_weight`:

        kl = T^2 sum_v p_v (log p_v - log softmax(z / T)_v)
        ce = lse(z) - z[t]
        dz = w T (softmax(z / T) - p) + (1 - w) (softmax(z) - onehot(t))

    All are 0 in a row whose target is `ignore_index`.

    Shape: logits and teacher [R, V] with stride 1 within a row and equal dtypes, targets int64 [R], kl and ce [R] in
    fp32 (float64 for logits in float64, which run the reference). Targets are below V.

    Raises:
        ConfigError: shapes or dtypes that do not fit.

    Reference: Hinton et al., 2015, arXiv:1503.02531.
    """
    _check(logits, teacher, targets, kl, ce)
    run = reference_distillation_rows if logits.dtype == torch.float64 else torch.ops.caramba.distillation_rows.default
    run(logits, teacher, targets, kl, ce, ignore_index, temperature, kl_weight, writes)


@caramba_op(
    "distillation_rows",
    fake=lambda logits, teacher, targets, kl, ce, *_: _check(logits, teacher, targets, kl, ce),
    mutates=("logits", "kl", "ce"),
)
def reference_distillation_rows(
    logits: Tensor,
    teacher: Tensor,
    targets: Tensor,
    kl: Tensor,
    ce: Tensor,
    ignore_index: int,
    temperature: float,
    kl_weight: float,
    writes: bool,
) -> None:
    """Compute `distillation_rows` in plain PyTorch, in the dtype of the losses."""
    _check(logits, teacher, targets, kl, ce)
    counts = targets != ignore_index
    index = torch.where(counts, targets, 0)[:, None]
    z = logits.to(kl.dtype)
    log_q = (z / temperature).log_softmax(dim=-1)
    log_p = (teacher.to(kl.dtype) / temperature).log_softmax(dim=-1)
    p = log_p.exp()
    kl.copy_(torch.where(counts, (p * (log_p - log_q)).sum(-1) * temperature**2, 0.0))
    log_z = z.log_softmax(dim=-1)
    ce.copy_(torch.where(counts, -log_z.gather(-1, index).squeeze(-1), 0.0))
    if writes:
        grad = (log_q.exp() - p) * (kl_weight * temperature)
        if kl_weight < 1.0:
            grad += log_z.exp().scatter_add_(-1, index, -torch.ones_like(log_z[:, :1])) * (1.0 - kl_weight)
        logits.copy_(grad.masked_fill_(~counts[:, None], 0.0))


def _check(logits: Tensor, teacher: Tensor, targets: Tensor, kl: Tensor, ce: Tensor) -> None:
    rows = logits.shape[:1]
    if logits.dim() != 2 or teacher.shape != logits.shape or not rows == targets.shape == kl.shape == ce.shape:
        raise ConfigError(
            f"distillation_rows: got logits {tuple(logits.shape)}, teacher {tuple(teacher.shape)}, targets "
            f"{tuple(targets.shape)}, kl {tuple(kl.shape)}, ce {tuple(ce.shape)}; expected [R, V] twice and [R]"
        )
    wide = torch.promote_types(logits.dtype, torch.float32)
    if (
        not logits.is_floating_point()
        or teacher.dtype != logits.dtype
        or targets.dtype != torch.int64
        or not kl.dtype == ce.dtype == wide
    ):
        raise ConfigError(
            f"distillation_rows: got logits {logits.dtype}, teacher {teacher.dtype}, targets {targets.dtype}, kl "
            f"{kl.dtype}, ce {ce.dtype}; expected one floating dtype, int64 and {wide}"
        )
    if not logits.device == teacher.device == targets.device == kl.device == ce.device or not logits.shape[1]:
        raise ConfigError(
            f"distillation_rows: got logits {tuple(logits.shape)} on {logits.device} and teacher on "
            f"{teacher.device}; expected one device and at least one class"
        )
    if not (kl.is_contiguous() and ce.is_contiguous()) or (
        logits.numel() and (logits.stride(1) != 1 or teacher.stride(1) != 1)
    ):
        raise ConfigError(
            f"distillation_rows: got strides {logits.stride()} and {teacher.stride()}; expected 1 within a row, and "
            "contiguous losses"
        )
