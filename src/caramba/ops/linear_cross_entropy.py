"""The op `caramba::linear_cross_entropy`: a head and its loss together, so that the logits never exist at one time.

It is matrix products of torch around `caramba::cross_entropy_rows`, which is what has a kernel of its own.
"""

from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, leave_traces, refuse_tangents, upcast


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
    _check_cross_entropy_rows(logits, targets, losses)
    if logits.dtype == torch.float64:
        return reference_cross_entropy_rows(logits, targets, losses, ignore_index, scale, z_loss, writes)
    return torch.ops.caramba.cross_entropy_rows.default(logits, targets, losses, ignore_index, scale, z_loss, writes)


@caramba_op(
    "cross_entropy_rows",
    fake=lambda logits, targets, losses, *_: _check_cross_entropy_rows(logits, targets, losses),
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
    _check_cross_entropy_rows(logits, targets, losses)
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


def _check_cross_entropy_rows(logits: Tensor, targets: Tensor, losses: Tensor) -> None:
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


def scale_(x: Tensor, by: Tensor) -> Tensor:
    """Multiply x by a tensor of one element, in place, and return it.

    The kernel computes in at least fp32, rounds once, and touches nothing where the number is 1, as the scale of a
    loss without accumulation is; torch's own product of two devices' tensors of unlike dtypes runs at a tenth of the
    bandwidth.

    Shape: x any, by [] on its device.

    Raises:
        ConfigError: more than one element, another device, or what is not floating.
    """
    if by.numel() != 1 or not (x.is_floating_point() and by.is_floating_point()) or by.device != x.device:
        raise ConfigError(
            f"scale_: x is {x.dtype} on {x.device} and the factor {by.dtype} {tuple(by.shape)} on {by.device}; "
            "expected floating dtypes, one element and one device"
        )
    torch.ops.caramba.scale_.default(x, by)
    return x


@caramba_op("scale_", mutates=("x",))
def reference_scale(x: Tensor, by: Tensor) -> None:
    """Compute the op in plain PyTorch."""
    x.mul_(by.reshape(()))


EXTRA_BYTES = 10**9
"""Memory of a call besides its inputs and the weight's gradient, unless the caller sets the rows of a chunk: a chunk of
logits, the gradient of hidden, and copies of hidden and of the weight where their dtypes differ."""
LOGITS_BYTES = 2**29
"""Of one chunk of logits at most. More makes no matrix product faster."""
LEAST_LOGITS_BYTES = 2**28
"""Of one chunk of logits where the rest leaves less than this: smaller ones make dW's traffic what a call takes."""
ROW_TILE = 128  # a chunk of whole tiles leaves no matrix product with a nearly empty row of tiles
COLUMN_TILE = 64  # rows of logits begin at multiples of 128 bytes, whatever the size of the vocabulary


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    scale: float = 1.0,
    z_loss: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Return the mean cross-entropy of logits z = s h W^T, plus c times its z-loss.

        loss = 1/C sum_n [ lse(z_n) - z_n[t_n] + c lse(z_n)^2 ]

    The mean is over the C tokens whose target is not `ignore_index`. The forward computes the gradients chunk by chunk,
    6 N M V operations in all without recomputation; the backward only scales them. A chunk's logits, in hidden's dtype
    (under autocast in autocast's), are overwritten by their gradient; the softmax is in fp32 or float64. Besides the
    results, memory is one chunk of logits and, where dtypes differ, the weight in hidden's; the chunk is such that all
    this and dhidden, but not dW, stay within 1 GB where 256 MB of logits do. dW adds up in the weight's dtype over the
    chunks: in fp32 exact to rounding, in bfloat16 one more rounding (2^-9 of the entry) per chunk.

    Args:
        targets: class of each row; `ignore_index` does not count. All ignored: the loss is 0 and so are gradients.
        scale: s, of the logits. z_loss: c (PaLM has 1e-4). chunk: rows at a time; None: 256 to 512 MB of logits.

    Shape: hidden [N, M], weight [V, M], targets int64 [N] -> [] in fp32, in float64 for hidden in float64.

    Raises:
        ConfigError: shapes that do not fit, targets that are no integers, or on a CPU a target outside the vocabulary.
            Elsewhere the host does not wait for the targets: loss and dW are then NaN, and dhidden of that token, which
            shows which one it is. With TRITON_DEBUG=1 the kernel stops there.

    Reference: Wijmans et al., 2024, arXiv:2411.09009 (a loss that never holds all logits); Chowdhery et al., 2022,
    arXiv:2204.02311 (z-loss).
    """
    given = hidden
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    _check(hidden, weight, targets)
    refuse_tangents("linear_cross_entropy", hidden, weight)
    makes_gradients = torch.is_grad_enabled()
    if chunk is None:
        copies = (hidden.dtype != given.dtype) + (makes_gradients and hidden.requires_grad)
        features = copies * hidden.numel() + (weight.dtype != hidden.dtype) * weight.numel()
        chunk = rows_per_chunk(hidden, weight.shape[0], features * hidden.element_size())
    mean = torch.ops.caramba.linear_cross_entropy.default(
        hidden,
        weight,
        targets,
        ignore_index,
        scale,
        z_loss,
        max(1, chunk),
        makes_gradients and hidden.requires_grad,
        makes_gradients and weight.requires_grad,
    )[0]
    leave_traces(mean, hidden, weight)  # their gradients, which are all that is kept, lead back to neither
    counted = (targets != ignore_index).sum().clamp_min(1)
    return mean * len(targets) / counted


def rows_per_chunk(hidden: Tensor, n_classes: int, held_bytes: int = 0) -> int:
    """Return how many rows of logits a chunk has, in whole tiles, over chunks of about one size.

    `held_bytes` of the `EXTRA_BYTES` are taken by what else the call holds.
    """
    itemsize = max(hidden.element_size(), 4 if hidden.device.type == "cpu" else 0)
    row_bytes = itemsize * max(1, -(-n_classes // COLUMN_TILE) * COLUMN_TILE)
    logits_bytes = min(LOGITS_BYTES, max(LEAST_LOGITS_BYTES, EXTRA_BYTES - held_bytes))
    most = max(ROW_TILE, logits_bytes // row_bytes // ROW_TILE * ROW_TILE)
    n_chunks = max(1, -(-len(hidden) // most))
    return max(1, -(-len(hidden) // (n_chunks * ROW_TILE))) * ROW_TILE


def _fake(hidden: Tensor, weight: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    _check(hidden, weight, targets)
    wants_hidden, wants_weight = rest[-2:]
    return (
        hidden.new_empty((), dtype=torch.promote_types(hidden.dtype, torch.float32)),
        hidden.new_empty(hidden.shape if wants_hidden else 0),
        weight.new_empty(weight.shape if wants_weight else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, grad_hidden, grad_weight = output
    ctx.wanted = inputs[-2:]
    ctx.set_materialize_grads(False)  # or zeros as large as the weight would be made for nothing
    ctx.mark_non_differentiable(grad_hidden, grad_weight)
    ctx.save_for_backward(grad_hidden, grad_weight)


def _backward(ctx: Any, upstream: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 7
    if upstream is None:
        return None, None, *nothing
    grad_hidden, grad_weight = ctx.saved_tensors
    wants_hidden, wants_weight = ctx.wanted
    left = upstream / max(1, len(grad_hidden)) if grad_hidden.dtype == torch.float16 else upstream
    hidden = _scaled(grad_hidden, left) if wants_hidden else None
    return hidden, _scaled(grad_weight, upstream) if wants_weight else None, *nothing


@caramba_op(
    "linear_cross_entropy",
    fake=_fake,
    setup=_setup_context,
    backward=_backward,
    is_eager=False,
    takes_kernel=False,
)
def reference_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    scale: float,
    z_loss: float,
    chunk: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum of losses over N, all rows counted, and its gradients; those not wanted are empty.

    Three matrix products and one `cross_entropy_rows` per chunk, in one buffer of logits.
    """
    _check(hidden, weight, targets)
    if targets.device.type == "cpu":
        _check_range(targets, ignore_index, weight.shape[0])
    (n_rows, width), n_classes = hidden.shape, weight.shape[0]
    hidden, targets = hidden.detach().contiguous(), targets.contiguous()
    # Rows of the mean, not of the sum: what adds up over the chunks stays in the range of 16-bit floats.
    share = 1.0 / max(1, n_rows)
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        matrix = weight.detach().to(hidden.dtype)
        losses = hidden.new_empty(n_rows, dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_hidden = torch.empty_like(hidden) if wants_hidden else hidden.new_empty(0)
        # The first chunk writes it.
        grad_weight = weight.new_empty(n_classes, width) if wants_weight else weight.new_empty(0)
        if wants_weight and n_rows == 0:
            grad_weight.zero_()
        rows = min(chunk, n_rows)
        buffer = hidden.new_empty(rows, -(-n_classes // COLUMN_TILE) * COLUMN_TILE)
        if hidden.device.type == "cpu":
            # Its 16-bit products of odd width multiply the next column by zero: not NaN.
            buffer[:, n_classes:] = 0
        for start in range(0, n_rows, max(1, rows)):
            part = hidden[start : start + rows]
            logits = buffer[: len(part), :n_classes]
            torch.mm(part, matrix.t(), out=logits)
            cross_entropy_rows(
                logits,
                targets[start : start + rows],
                losses[start : start + rows],
                ignore_index=ignore_index,
                scale=scale,
                z_loss=z_loss,
                writes=wants_hidden or wants_weight,
            )
            if wants_hidden:
                place = grad_hidden[start : start + rows]
                torch.addmm(place, logits, matrix, beta=0, alpha=_hidden_share(hidden), out=place)
            if wants_weight:
                accumulate(grad_weight, logits.t(), part, beta=float(start > 0), alpha=share)
        return losses.sum() * share, grad_hidden, grad_weight


def _hidden_share(hidden: Tensor) -> float:
    """What dhidden is of its row of the sum. A row of the mean is below what float16 resolves, so there the backward,
    which knows the scale of the loss, makes it that."""
    return 1.0 if hidden.dtype == torch.float16 else 1.0 / max(1, len(hidden))


def accumulate(total: Tensor, left: Tensor, right: Tensor, *, beta: float, alpha: float) -> None:
    """total = beta total + alpha left @ right; what is in `total` is not read when beta is 0."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=beta, alpha=alpha, out=total)
    elif total.is_cuda and total.dtype == torch.float32:
        # 16-bit operands and a product in fp32, which is what the tensor cores add up in.
        torch.ops.aten.addmm.dtype_out(total, left, right, torch.float32, beta=beta, alpha=alpha, out=total)
    else:
        wide = torch.promote_types(total.dtype, left.dtype)
        product = torch.mm(left.to(wide), right.to(wide)).mul_(alpha)
        total.copy_(product if beta == 0 else product.add_(total))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or targets.dim() != 1
        or hidden.shape[1] != weight.shape[1]
        or len(targets) != len(hidden)
        or not len(weight)
    ):
        raise ConfigError(
            f"linear_cross_entropy: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets "
            f"{tuple(targets.shape)}, expected [N, M], [V, M] and [N], V at least 1; flatten batch and time first"
        )
    if targets.dtype != torch.int64 or not hidden.is_floating_point() or not weight.is_floating_point():
        raise ConfigError(
            f"linear_cross_entropy: hidden is {hidden.dtype}, weight {weight.dtype} and targets {targets.dtype}, "
            "expected floating point twice and int64"
        )
    if not hidden.device == weight.device == targets.device:
        raise ConfigError(
            f"linear_cross_entropy: hidden is on {hidden.device}, weight on {weight.device} and targets on "
            f"{targets.device}, expected one device"
        )


def _check_range(targets: Tensor, ignore_index: int, n_classes: int) -> None:
    outside = (targets != ignore_index) & ((targets < 0) | (targets >= n_classes))
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise ConfigError(
            f"linear_cross_entropy: target {int(targets[row])} of row {row} is outside the vocabulary of {n_classes}; "
            f"expected 0 to {n_classes - 1}, or {ignore_index} for a row that does not count"
        )


def _scaled(grad: Tensor, by: Tensor) -> Tensor:
    """Scale in place, which saves a copy as large as the weight, unless the graph is kept for another backward, or
    traced (tensors are then of a subclass). The scale itself is never rounded to 16 bits: all of a gradient would be
    off by the same 2^-9.
    """
    if type(grad) is not Tensor or grad.dtype == torch.float16:  # which has no room for the scale of a loss
        return (upcast(grad) * by).to(grad.dtype)
    keeps = getattr(getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None)
    return scale_(grad.clone() if keeps is None or keeps() else grad, by)
