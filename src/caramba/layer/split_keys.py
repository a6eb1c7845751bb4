"""Keys of two parts that are attended to where they lie: where they are wider than fused backends take, and behind a
prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.layer.score import CausalScore
from caramba.layer.small_batch import has_hooks
from caramba.layer.varlen import WIDEST
from caramba.ops import decoupled_attention, has_kernel, has_two_part_keys, implementation

OP = "decoupled_attention"


def supports_split_keys(
    score: CausalScore, q: Tensor, n_keys: int, widths: tuple[int, int, int], *, are_concatenated: bool
) -> bool:
    """Whether a kernel attends with the queries q [B, H, T, A + G] in the place of `score`, to keys whose parts, and to
    values, that are A, G and D features wide: `widths`. Up to `WIDEST` cuDNN is faster where T = S. With fewer queries
    that leaves flash, for which keys would have to be joined first; where they lie so (`are_concatenated`) it has them.

    A `q_chunk` counts for nothing: no scores are held.
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
    """Attend, with keys and values by tokens first, as products give them; `first` as in the score op.

    Shape: q [B, H, T, A + G], k_sem [B, S, K1, A], k_geo [B, S, K2, G], v [B, S, K3, D] -> [B, H, T, D].
    """
    k_sem, k_geo, v = (x.to(q.dtype) for x in (k_sem, k_geo, v))
    return decoupled_attention(q.transpose(1, 2), k_sem, k_geo, v, first).transpose(1, 2)


def uses_split_keys_kernel(config: AttentionLayerConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers of a config attend so wherever they train on a device in a dtype; with a window some may not."""
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
