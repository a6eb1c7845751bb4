"""The op `caramba::dba_decode_up`: decode attention of a latent, with what its heads read mapped to their values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import REFERENCE, direct, implementation
from caramba.ops.dba_decode import StoredStream, kernel_takes
from caramba.ops.decode_arguments import check_dba_decode
from caramba.ops.decode_on_host import host_dba_decode
from caramba.ops.head_values import reference_head_values, refuse_gradients
from caramba.ops.latent_queries import HALF

torch.library.define(
    "caramba::dba_decode_up",
    "(Tensor q_sem, Tensor q_geo, str[] kinds, Tensor[] k_sem, Tensor[] k_geo, Tensor seqlens, Tensor? n_packed, "
    "Tensor v_up, int window, int max_seqlen) -> Tensor",
)


def dba_decode_up(
    q_sem: Tensor,
    q_geo: Tensor,
    k_sem: StoredStream,
    k_geo: StoredStream,
    seqlens: Tensor,
    v_up: Tensor,
    *,
    n_packed: Tensor | None = None,
    window: int | None = None,
    max_seqlen: int = 0,
) -> Tensor:
    """Return `head_values` of what `dba_decode` reads of a latent without a null key; there are no gradients.

    One kernel joins the splits of a head and maps what it has read: a launch less, and no pass over what heads read.
    That is rounded to q's dtype before the product, as between the two ops.

    Shape: as of `dba_decode` without v, v_up [H, Dsem, D]; returns [B, T, H, D], contiguous, in q's dtype.

    Raises:
        ConfigError: an argument of another shape, dtype, device or stride, or gradients that are wanted.
    """
    kinds = [str(k_sem.kind), str(k_geo.kind)]
    span = 0 if window is None else window
    given = (q_sem, q_geo, kinds, k_sem.tensors, k_geo.tensors, seqlens, n_packed, v_up, span, max_seqlen)
    refuse_gradients("dba_decode_up", q_sem, q_geo, v_up)
    run = direct("dba_decode_up", q_sem, q_geo, k_sem.tensors[0], seqlens, v_up)
    if run is not None:
        return run(*given, admit=_admit)
    instead = _admit(*given)
    if instead is None or implementation("dba_decode_up", q_sem.device) == REFERENCE:
        return torch.ops.caramba.dba_decode_up.default(*given)
    return instead(*given)


def _admit(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    v_up: Tensor,
    window: int,
    max_seqlen: int,
) -> Callable[..., Tensor] | None:
    """Refuse what the op does not take; return what runs in the place of kernels, where they do not take it."""
    check_dba_decode(q_sem, q_geo, kinds, k_sem, k_geo, [], seqlens, n_packed, [], window, max_seqlen, 0)
    heads, width = q_sem.shape[1], q_sem.shape[-1]
    if v_up.dim() != 3 or v_up.shape[:2] != (heads, width) or v_up.device != q_sem.device:
        raise ConfigError(
            f"dba_decode_up: v_up is {tuple(v_up.shape)} on {v_up.device}, expected [{heads}, {width}, D] on "
            f"{q_sem.device}"
        )
    takes = q_sem.dtype in HALF and kernel_takes(q_sem.dtype, (width, q_geo.shape[-1]))
    return None if takes else plain_dba_decode_up


def plain_dba_decode_up(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    k_sem: list[Tensor],
    k_geo: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    v_up: Tensor,
    window: int,
    max_seqlen: int,
) -> Tensor:
    """Compute the op in plain PyTorch."""
    read, _ = host_dba_decode(
        q_sem, q_geo, kinds, k_sem, k_geo, [], seqlens, n_packed, [], window, max_seqlen, 0
    )
    return reference_head_values(read.transpose(1, 2), v_up)


torch.library.impl("caramba::dba_decode_up", "CompositeExplicitAutograd", plain_dba_decode_up)


@torch.library.register_fake("caramba::dba_decode_up")
def _(*given: Any) -> Tensor:
    _admit(*given)
    q_sem, v_up = given[0], given[7]
    batch, heads, n_queries, _ = q_sem.shape
    return q_sem.new_empty((batch, n_queries, heads, v_up.shape[-1]))
