"""The op `caramba::argmax_logprob`: argmax of rows of logits and its log-probability, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct, empty_upcast, upcast


def argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return (argmax z, log softmax(z) there) of every row z, of equals the first; the latter in at least fp32.

    log softmax(z)[argmax z] = -log(sum exp(z - max z)), which is NaN where z holds one. There are no gradients.

    Shape: logits [B, V] to int64 [B] and [B].

    Raises:
        ConfigError: logits that are not floating [B, V] with V at least 1.
    """
    if logits.dim() != 2 or not logits.is_floating_point() or logits.shape[1] == 0:
        raise ConfigError(
            f"argmax_logprob: logits are {logits.dtype} of shape {tuple(logits.shape)}, expected floating [B, V >= 1]"
        )
    if logits.requires_grad:
        logits = logits.detach()
    if logits.dtype == torch.float64:  # no kernel takes it
        return reference_argmax_logprob(logits)
    return (direct("argmax_logprob", logits) or torch.ops.caramba.argmax_logprob.default)(logits)


def _fake(logits: Tensor) -> tuple[Tensor, Tensor]:
    n_rows = logits.shape[:1]
    return logits.new_empty(n_rows, dtype=torch.int64), empty_upcast(logits, n_rows)


@caramba_op("argmax_logprob", fake=_fake)
def reference_argmax_logprob(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the op in plain PyTorch."""
    index = logits.argmax(-1, keepdim=True)
    return index.squeeze(1), upcast(logits).log_softmax(-1).gather(1, index).squeeze(1)
