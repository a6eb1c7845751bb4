"""Pass `prefix_attention`: exact first tokens and all later ones in one kernel of a training step."""

import torch
from torch import Tensor, nn

from caramba.layer.attention import AttentionLayer
from caramba.layer.latent import FirstTokens
from caramba.layer.score import CausalScore, supports_two_widths
from caramba.lower.lowering import Replaced, has_hooks, is_unmodified, replace_class
from caramba.ops import has_kernel
from caramba.ops.prefix_attention import has_fused_widths, prefix_attention


class PrefixAttention(FirstTokens):
    """First tokens whose softmax over whole training sequences is one kernel, with heads no wider than the keys."""

    def join(
        self,
        score: CausalScore,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kept: Tensor,
        total: Tensor,
        first: Tensor | None = None,
    ) -> Tensor:
        if first is not None or not has_prefix_kernel(score, q, k, v):
            return super().join(score, q, k, v, kept, total, first)
        n, late = self.n_tokens, slice(self.n_tokens, None)
        kept = kept if kept.dtype == q.dtype else kept.float()
        given = (q, k.to(q.dtype), v.to(q.dtype), kept, total.float())
        queries, keys, values, out, lse = (x[:, :, late] for x in given)
        out = prefix_attention(queries, keys, values, out, lse)
        return torch.cat((kept[:, :, :n].to(q.dtype), out), dim=2)


def has_prefix_kernel(score: CausalScore, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if the fused kernel applies: a whole causal sequence with gradients, heads as wide as cuDNN supports."""
    return (
        torch.is_grad_enabled()
        and q.shape[2] == k.shape[2]
        and q.shape[1] == k.shape[1]
        and (score.window is None or score.window >= q.shape[2])
        and not (score.training and score.dropout > 0)
        and has_fused_widths(q.dtype, q.shape[-1], v.shape[-1])
        and has_kernel("prefix_attention", q)
        and supports_two_widths(q)
    )


def fuse_prefix_attention(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower first tokens whose score op nobody watches; return them."""
    return [
        replace_class(first, PrefixAttention)
        for layer in model.modules()
        if isinstance(layer, AttentionLayer) and is_unmodified(layer.score, CausalScore)
        for first in [getattr(layer.projection, "first", None)]
        if isinstance(first, FirstTokens) and not isinstance(first, PrefixAttention)
        if has_kernel("prefix_attention", next(first.parameters())) and not has_hooks(first)
    ]
