"""The op `caramba::dba_decode_up`: what heads read of a latent, mapped to their values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from caramba.console import logger
from caramba.errors import ConfigError
from caramba.ops.backend import REFERENCE, caramba_op, direct, implementation, refuse_gradients
from caramba.ops.dba_decode import (
    StoredStream,
    check_dba_decode,
    check_lengths,
    dba_decode,
    host_dba_decode,
    kernel_takes,
    span_of,
)
from caramba.ops.latent_queries import HALF
from caramba.ops.small_batch_linear import per_head_linear, reference_per_head_linear


def dba_decode_up(
    q_sem: Tensor,
    q_geo: Tensor,
    c: StoredStream,
    k_geo: StoredStream,
    up: Tensor,
    seqlens: Tensor,
    *,
    n_packed: Tensor | None = None,
    window: int | None = None,
    max_seqlen: int = 0,
    n_splits: int = 0,
) -> Tensor:
    """Return o_h U_h for every head h, with o_h the output of `dba_decode` over the latent c.

    o_h is rounded to q's dtype before the product.

    Arguments are those of `dba_decode` in its `latent` layout, without a null key. There are no gradients.

    Shape: q_sem [B, H, T, R], q_geo [B, H, T, Dgeo], up [H, R, D]; returns [B, T, H, D], contiguous, in q's dtype.

    Raises:
        ConfigError: an argument of another shape, dtype, device or stride, or gradients that are wanted.
    """
    kinds, span = [str(c.kind), str(k_geo.kind)], span_of("dba_decode_up", window)
    sem, geo = c.tensors, k_geo.tensors
    given = (q_sem, q_geo, kinds, sem, geo, seqlens, n_packed, up, span, max_seqlen, n_splits)
    refuse_gradients("dba_decode_up", q_sem, q_geo, up)
    if not torch.compiler.is_compiling() and logger.is_debug:
        check_lengths([sem, geo], seqlens, n_packed)
    run = direct("dba_decode_up", q_sem, q_geo, sem[0], seqlens, up)
    if run is not None:
        return run(*given, admit=_admit)
    instead = _admit(*given)
    if instead is None or implementation("dba_decode_up", q_sem.device) == REFERENCE:
        return torch.ops.caramba.dba_decode_up.default(*given)
    return instead(*given)


def check_dba_decode_up(*given: Any) -> None:
    """Refuse what the op does not take, by shapes and dtypes alone."""
    check_dba_decode(*_of_decode(*given))
    q_sem, up = given[0], given[7]
    heads, rank = q_sem.shape[1], q_sem.shape[3]
    if up.dim() != 3 or up.shape[:2] != (heads, rank) or up.device != q_sem.device:
        raise ConfigError(
            f"dba_decode_up: up is {tuple(up.shape)} on {up.device}, expected [{heads}, {rank}, D] on {q_sem.device}"
        )


def _of_decode(
    q_sem: Tensor,
    q_geo: Tensor,
    kinds: list[str],
    c: list[Tensor],
    k_geo: list[Tensor],
    seqlens: Tensor,
    n_packed: Tensor | None,
    up: Tensor,
    *sizes: int,
) -> tuple[Any, ...]:
    return q_sem, q_geo, kinds, c, k_geo, [], seqlens, n_packed, [], *sizes


def _admit(*given: Any) -> Callable[..., Tensor] | None:
    check_dba_decode_up(*given)
    q_sem, _, _, c, k_geo = given[:5]
    widths = [parts[-1].shape[-1] for parts in (c, k_geo)]
    return None if q_sem.dtype in HALF and kernel_takes(q_sem.dtype, widths) else _apart


def _apart(*given: Any) -> Tensor:
    """Compute the op by the two that it joins, each of which knows what its kernels take."""
    q_sem, q_geo, kinds, c, k_geo, seqlens, n_packed, up, window, max_seqlen, n_splits = given
    streams = StoredStream(kinds[0], *c), StoredStream(kinds[1], *k_geo)
    options = {"window": window or None, "max_seqlen": max_seqlen, "n_splits": n_splits}
    read, _ = dba_decode(q_sem, q_geo, *streams, None, seqlens, n_packed=n_packed, **options)
    return per_head_linear(read.transpose(1, 2), up)


def _fake(*given: Any) -> Tensor:
    check_dba_decode_up(*given)
    q_sem, up = given[0], given[7]
    batch, heads, n_queries, _ = q_sem.shape
    return q_sem.new_empty((batch, n_queries, heads, up.shape[-1]))


@caramba_op(
    "dba_decode_up",
    fake=_fake,
    schema="(Tensor q_sem, Tensor q_geo, str[] kinds, Tensor[] c, Tensor[] k_geo, Tensor seqlens, Tensor? n_packed, "
    "Tensor up, int window, int max_seqlen, int n_splits) -> Tensor",
)
def host_dba_decode_up(*given: Any) -> Tensor:
    """Compute the op in plain PyTorch."""
    read, _ = host_dba_decode(*_of_decode(*given))
    return reference_per_head_linear(read.transpose(1, 2), given[7])
