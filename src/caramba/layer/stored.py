"""Keys and values as a cache stores them, which decode attention reads without a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from caramba.ops import StoredStream, dba_decode, dba_decode_up


@dataclass(frozen=True)
class StoredKeys:
    """The streams of one cache and how much of them is in use.

    Attributes:
        streams: every stream's allocation, by name.
        lengths: tokens stored, int32 [B], on the device.
        n_packed: tokens that quantised streams hold as blocks, int32 [1], or None.
        longest: tokens stored, on the host; it serves only to divide the work.
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
        """Return what scaled queries read, [B, H, T, Dv]; `names` are the streams of keys and, if any, of values."""
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
        """Return what scaled queries read of a latent, mapped by each head's `up`: [H, R, D] to [B, H, T, D]."""
        c, k_geo = (self.streams[name] for name in names)
        read = dba_decode_up(
            *(q_sem, q_geo, c, k_geo, up, self.lengths),
            n_packed=self.n_packed,
            window=window,
            max_seqlen=self.longest,
        )
        return read.transpose(1, 2)
