"""Pass `decode_attention`: decode steps attend to a cache as it is stored, by one kernel for any format."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from caramba.cache import Context, DeviceContext, LayerCache
from caramba.cache.view import CacheView
from caramba.console import logger
from caramba.layer.attention import AttentionLayer
from caramba.layer.documents import Documents
from caramba.layer.projection import Angles, Queries
from caramba.lower.lowering import Replaced, has_hooks, replace_each
from caramba.ops import fused_decode_available
from caramba.ops.dba_append import dba_append
from caramba.ops.dba_decode import MAX_QUERIES, kernel_takes

if TYPE_CHECKING:
    from caramba.lower.absorb_latent import AbsorbedLatent


class DecodeAttention(AttentionLayer):
    """Attention whose decode steps read no copy of the cache.

    With a context on the host that is where a kernel reads the cache's format. With lengths on the device, layers of
    equal frequencies share one table of angles, and keys are rotated while they are stored.
    """

    def read(self, x: Tensor, ctx: Context | DeviceContext | Documents | None = None) -> Tensor:
        if isinstance(ctx, DeviceContext):
            q, stored = self._step(x, ctx)
        elif isinstance(ctx, Context):
            q, streams = self.projection(x, ctx.position)
            streams, cache = self.round_streams(streams), ctx.next_cache()
            if not self._reads_stored(cache, q):
                heads = self.projection.attend(q, cache.append(streams), self.score, self.null())
                return heads.transpose(1, 2).flatten(2)
            cache.write(streams)
            stored = CacheView(cache.storage(), *ctx.lengths(cache), cache.n_tokens)
            q = self.projection.cache_queries(q)
        else:
            return super().read(x, ctx)
        heads = self.projection.attend_cache(q, stored, self.score.window, self.null())
        return heads.transpose(1, 2).flatten(2)

    def _step(self, x: Tensor, ctx: DeviceContext) -> tuple[Queries, CacheView]:
        self.check_step(ctx, x.shape[1])
        cache, projection, angles = ctx.next_cache(), self.projection, self._angles(x, ctx)
        if angles is not None and hasattr(projection, "takes_step"):  # by name: other models need not load it
            latent = cast("AbsorbedLatent", projection)
            if latent.takes_step(x):
                return latent.step(x, ctx, cache, *angles), ctx.view(cache)
        q, streams = projection(x, ctx.offset, angles=angles)
        rotated = -1 if angles is None else cache.names.index(projection.rotated_stream)
        cos, sin = (None, None) if angles is None else angles
        dba_append([streams[name] for name in cache.names], cache.allocations, ctx.places, cos, sin, rotated)
        return projection.cache_queries(q), ctx.view(cache)

    def _angles(self, x: Tensor, ctx: DeviceContext) -> Angles:
        """Return cos and sin of a step's positions, which layers of equal frequencies share."""
        rope = self.projection.rope
        key = None if rope is None else rope.key
        if key is None and (ctx.separate_ropes or not torch.compiler.is_compiling()):
            key = rope
        angles = None if key is None else ctx.angles.get(key)
        if angles is None:
            angles = self.projection.angles(ctx.offset, x.shape[1], x.device)
            if key is not None and angles is not None:
                ctx.angles[key] = angles
        return angles

    def _reads_stored(self, cache: LayerCache, q: Tensor) -> bool:
        """Whether these few queries can read the cache in the format that it is stored in.

        Not in a dtype or width beyond the kernels; gradients never get here, as a cache stores none.
        """
        has_dropout = self.training and self.score.dropout > 0
        if cache.is_for_host or q.shape[2] > MAX_QUERIES or has_dropout or not fused_decode_available(cache, q.device):
            return False
        widths = [tensor.width for tensor in cache.tensors.values()]
        if kernel_takes(q.dtype, widths):
            return True
        if not torch.compiler.is_compiling():
            log_unfused_decode(q.dtype, max(widths))
        return False


@functools.cache  # log once per dtype and width
def log_unfused_decode(dtype: torch.dtype, width: int) -> None:
    """Tell that no kernel takes a cache's streams."""
    logger.info(
        f"dba_decode: no kernel for {dtype} and streams of {width} per head; cached decode makes plain keys and values"
    )


def lower_decode_attention(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
    """Lower attention layers without hooks, or a `read` or score op of their own; return them."""
    return replace_each(
        model,
        AttentionLayer,
        DecodeAttention,
        lambda layer: type(layer).read is AttentionLayer.read and not has_hooks(layer.score),
    )
