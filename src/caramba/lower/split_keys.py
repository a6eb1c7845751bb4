"""Pass `split_keys`: latent layers attend to keys in two parts, read in place.

Used if keys are wider than fused backends support, and after a cached prefix.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from caramba.config.attention import uses_split_keys
from caramba.config.layer import AttentionLayerConfig
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents
from caramba.layer.latent import LatentProjection
from caramba.layer.score import HALF_PRECISION, WIDEST, CausalScore
from caramba.lower.lowering import Replaced, has_hooks, replace_class
from caramba.ops import has_kernel, implementation
from caramba.ops.backend import REFERENCE
from caramba.ops.decoupled_attention import decoupled_attention, has_two_part_keys

OP = "decoupled_attention"


class SplitKeys(LatentProjection):
    """A latent projection whose keys stay in two parts where the kernel takes them."""

    def attend_expanded(
        self, q: Tensor, streams: Mapping[str, Tensor], score: CausalScore, documents: Documents | None = None
    ) -> Tensor:
        if not self._takes(score, q, streams["c"].shape[2], self.query_dim, are_concatenated=False):
            return super().attend_expanded(q, streams, score, documents)
        c, k_geo = (streams[name].to(q.dtype).transpose(1, 2) for name in ("c", "k_geo"))
        keys, values = self.project_keys(c.squeeze(2)), self.project_values(c.squeeze(2))
        return split_key_attention(q, keys, k_geo, values, documents)

    def attend_absorbed(
        self, q: Tensor, streams: Mapping[str, Tensor], score: CausalScore, documents: Documents | None = None
    ) -> Tensor:
        n_keys, are_concatenated = streams["c"].shape[2], "joined" in streams
        if q.shape[2] == 1 or not self._takes(score, q, n_keys, self.dims.v, are_concatenated=are_concatenated):
            return super().attend_absorbed(q, streams, score, documents)
        c, k_geo = (streams[name].transpose(1, 2) for name in ("c", "k_geo"))
        return self.map_values(split_key_attention(torch.cat(self.cache_queries(q), dim=-1), c, k_geo, c, documents))

    def _takes(self, score: CausalScore, q: Tensor, n_keys: int, width: int, *, are_concatenated: bool) -> bool:
        """True if the kernel replaces `score` for queries [B, H, T, .]; semantic keys and values are `width` wide.

        Up to `WIDEST` cuDNN is faster if T = S. With fewer queries only flash is left, which needs concatenated keys;
        `are_concatenated` is True if the cache stores them so. `q_chunk` is ignored: the kernel stores no scores.
        """
        geo, is_prefixed = self.dims.rope, q.shape[2] < n_keys and not torch.is_grad_enabled()
        return (
            (width + geo > WIDEST or (is_prefixed and not are_concatenated))
            and (score.window is None or score.window >= n_keys)
            and not (score.training and score.dropout > 0)
            and has_two_part_keys(q.dtype, width, geo, width)
            and has_kernel(OP, q)
        )


def split_key_attention(q: Tensor, k_sem: Tensor, k_geo: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
    """Attend to keys in two parts, token-major as linear layers return them.

    Shape: q [B, H, T, A + G], k_sem [B, S, K1, A], k_geo [B, S, K2, G], v [B, S, K3, D] -> [B, H, T, D].
    """
    k_sem, k_geo, v = (x.to(q.dtype) for x in (k_sem, k_geo, v))
    first = None if documents is None else documents.first
    return decoupled_attention(q.transpose(1, 2), k_sem, k_geo, v, first).transpose(1, 2)


def split_keys(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower latent projections without null keys or first tokens, whose score op nobody replaced or watches."""
    return [
        replace_class(layer.projection, SplitKeys)
        for layer in model.modules()
        if isinstance(layer, AttentionLayer)
        and isinstance(layer.projection, LatentProjection)
        and not isinstance(layer.projection, SplitKeys)
        and layer.projection.null_c is None
        and layer.projection.first is None
        and has_kernel(OP, layer.projection.q_sem_map)
        # Tensor parallelism has a score op of its own.
        and type(layer.score).forward is CausalScore.forward
        and not any(has_hooks(part) for part in (layer.score, layer.projection))
    ]


def uses_split_keys_kernel(config: AttentionLayerConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """True if training layers of a config on a device in a dtype always use the split-key kernel."""
    return uses_split_keys(config) and dtype in HALF_PRECISION and implementation(OP, device) != REFERENCE
