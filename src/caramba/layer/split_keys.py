"""Split-key attention: keys in two parts, read in place.

Used if keys are wider than fused backends support, and after a cached prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.layer.score import CausalScore
from caramba.layer.small_batch import has_hooks
from caramba.layer.varlen import WIDEST
from caramba.ops import has_kernel, implementation
from caramba.ops.decoupled_attention import decoupled_attention, has_two_part_keys

OP = "decoupled_attention"


def supports_split_keys(
    score: CausalScore, q: Tensor, n_keys: int, widths: tuple[int, int, int], *, are_concatenated: bool
) -> bool:
    """True if the split-key kernel replaces `score` for queries q [B, H, T, A + G].

    `widths` are the features A, G and D of both key parts and of values. Up to `WIDEST` cuDNN is faster if T = S. With
    fewer queries only flash is left, which needs concatenated keys; `are_concatenated` is True if the cache stores
    them so. `q_chunk` is ignored: the kernel stores no scores.
    """
    sem, geo, _ = widths
    return (
        (sem + geo > WIDEST or (not are_concatenated and q.shape[2] < n_keys and not torch.is_grad_enabled()))
        and (score.window is None or score.window >= n_keys)
        and not (score.training and score.dropout > 0)
        and not has_hooks(score)
        and type(score).forward is CausalScore.forward
        and has_two_part_keys(q.dtype, *widths)
        and has_kernel(OP, q)
    )


def split_key_attention(q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, first: Tensor | None) -> Tensor:
    """Attend to keys in two parts, token-major as linear layers return them; `first` as in the score op.

    Shape: q [B, H, T, A + G], k_sem [B, S, K1, A], k_geo [B, S, K2, G], v [B, S, K3, D] -> [B, H, T, D].
    """
    k_sem, k_geo, v = (x.to(q.dtype) for x in (k_sem, k_geo, v))
    return decoupled_attention(q.transpose(1, 2), k_sem, k_geo, v, first).transpose(1, 2)


def uses_split_keys_kernel(config: AttentionLayerConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """True if training layers of a config on a device in a dtype always use the split-key kernel."""
    dims, width = config.dims(), config.query_dim
    if not config.is_latent or config.null_attn or dims.first_tokens or config.dropout > 0:
        return False
    # As `latent.expanding_is_cheaper` decides for training, where T = S.
    sem = width if dims.v > width else dims.v
    return (
        sem + dims.rope > WIDEST
        and config.local_window is None
        and has_two_part_keys(dtype, sem, dims.rope, sem)
        and implementation(OP, device) != "reference"
    )
