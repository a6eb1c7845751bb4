"""View of a cache's stored keys and values, which decode attention reads without a copy."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from caramba.ops.dba_decode import ZEROS, StoredStream, dba_decode
from caramba.ops.dba_decode_up import dba_decode_up

ZERO_WIDTH = 16
"""Maximum features of `zero_keys`: the minimum key width of the kernels."""
_zeros: dict[torch.device, Tensor] = {}


@dataclass(frozen=True)
class CacheView:
    """The streams of one cache and how many of their tokens are valid.

    Attributes:
        streams: every stream's allocation, by name.
        lengths: tokens stored, int32 [B], on the device.
        n_packed: tokens that quantised streams store as blocks, int32 [1], or None.
        longest: tokens stored, counted on the host; used only to split the work.
    """

    streams: Mapping[str, StoredStream]
    lengths: Tensor
    n_packed: Tensor | None
    longest: int

    def attend(
        self,
        q_sem: Tensor,
        q_geo: Tensor,
        names: tuple[str, ...],
        *,
        window: int | None,
        null: tuple[Tensor, ...] | None,
    ) -> Tensor:
        """Attend with scaled queries; return [B, H, T, Dv]. `names` are the streams of keys and values."""
        k_sem, k_geo, *v = (self.streams[name] for name in names)
        read, _ = dba_decode(
            q_sem,
            q_geo,
            k_sem,
            k_geo,
            v[0] if v else None,
            self.lengths,
            n_packed=self.n_packed,
            window=window,
            null=None if null is None else tuple(row.to(q_sem.dtype) for row in null),
            max_seqlen=self.longest,
        )
        return read

    def attend_up(
        self, q_sem: Tensor, q_geo: Tensor, names: tuple[str, str], up: Tensor, *, window: int | None
    ) -> Tensor:
        """Attend to a latent and apply each head's `up` [H, R, D]; return [B, H, T, D]."""
        c, k_geo = (self.streams[name] for name in names)
        read = dba_decode_up(
            *(q_sem, q_geo, c, k_geo, up, self.lengths),
            n_packed=self.n_packed,
            window=window,
            max_seqlen=self.longest,
        )
        return read.transpose(1, 2)


def zero_keys(k: StoredStream, width: int) -> StoredStream:
    """Return zero keys as the second key part of a quantised cache, because `dba_decode` reads keys in two parts.

    They are an expanded view of one row.

    Shape: [B, K, S, width] for what k's codes [B, N, S, ·] and tail [B, K, C, ·] hold, S and C together.
    """
    assert k.tail is not None
    batch, kv_heads, n_tail, _ = k.tail.shape
    row = _zero_row(k.values.device)[:width]
    return StoredStream(ZEROS, row.expand(batch, kv_heads, k.values.shape[2] + n_tail, width))


def _zero_row(device: torch.device) -> Tensor:
    """Return cached zeros, so that a step does not write them again for every layer.

    Zeros made during graph capture or compilation are not cached: the graph has not run yet.
    """
    found = None if torch.compiler.is_compiling() else _zeros.get(device)
    if found is None:
        with torch.inference_mode(False):
            found = torch.zeros(ZERO_WIDTH, dtype=torch.bfloat16, device=device)
        is_passing = torch.compiler.is_compiling() or (
            device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        )
        if not is_passing:
            _zeros[device] = found
    return found
