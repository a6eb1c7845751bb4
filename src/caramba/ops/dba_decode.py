"""The op `caramba::dba_decode`: a few queries of decoupled attention on a cache, in the format it is stored in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba.console import logger
from caramba.ops.backend import REFERENCE, caramba_op, direct, implementation
from caramba.ops.decode_arguments import check_dba_decode, check_lengths, span_of
from caramba.ops.decode_on_host import host_dba_decode
from caramba.ops.decode_reference import reference_dba_decode
from caramba.ops.first_order import refuse_gradients

WIDEST = {torch.float32: 128, torch.float16: 512, torch.bfloat16: 512}
"""Widest head that kernels take, by the queries' dtype: tiles fit shared memory, and compile in less than a minute."""


class StoredStream(NamedTuple):
    """One stream as the cache stores it, the whole allocation; unused slots are never read.

    Numbers (fp32, fp16, bf16): `values` [B, K, S, D], any strides but a unit one along D, so both parts of a tensor
    that holds two streams side by side may be passed as views. Blocks (q8_0, q4_0, nf4), as `BlockStore` has them:
    `values` are codes [B, N, S, code_width] of the K*D features of all heads, `scales` [B, N, S, 1], and the
    tokens from `n_packed` on are in `tail` [B, K, C, D], bfloat16. For undivided keys, k_geo has kind `ZEROS`: bf16
    zeros, one row in memory expanded to all tokens. Not every kernel reads it.
    """

    kind: str
    values: Tensor
    scales: Tensor | None = None
    tail: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """What there is, in the op's order: numbers alone, or codes, scales and tail."""
        _, values, scales, tail = self
        if scales is None and tail is None:
            return [values]
        return [part for part in (values, scales, tail) if part is not None]


def kernel_takes(dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Whether a kernel of the op takes queries of this dtype on streams of these widths per head."""
    return max(widths) <= WIDEST.get(dtype, 0)


def dba_decode(
    q_sem: Tensor,
    q_geo: Tensor,
    k_sem: StoredStream,
    k_geo: StoredStream,
    v: StoredStream | None,
    seqlens: Tensor,
    *,
    n_packed: Tensor | None = None,
    window: int | None = None,
    null: tuple[Tensor, ...] | None = None,
    max_seqlen: int = 0,
    n_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend: o = softmax(q_sem k_sem^T + q_geo k_geo^T + mask) v, and the logarithm of the sum of exponentials.

    The T queries of sequence b are the last T of its `seqlens[b]` stored tokens: query t sees the first
    seqlens[b] - T + t + 1 of them, with `window` only the last `window` of those. A length beyond what is allocated
    counts as what is allocated; under --debug it is refused, outside of captured graphs. A query that sees nothing
    gets zeros and -inf.

    Queries come scaled. Where a stream of keys is stored Hadamard-rotated the caller rotates its queries, and where
    values are (in `latent`, whenever c is) the output comes out rotated: the caller rotates it back.

    With `v` None the layout is `latent`: one key/value head, K = 1, whose semantic key is the value too (Dv = Dsem).
    Query heads share key/value heads in consecutive groups of H/K. `null` is a semantic key [K, Dsem], a geometric
    key [K, Dgeo] and, unless latent, a value [K, Dv] that every query sees, in q's dtype. `n_packed` is the number
    of tokens that every quantised stream holds as blocks, for all sequences alike or each.

    `max_seqlen` is what the longest sequence is expected to have (0: what is allocated) and only serves to choose
    how the work is cut; `n_splits` sets that (0: chosen). The numbers do not depend on either beyond rounding, and
    nothing depends on lengths on the host, so a captured graph stays right while sequences grow. Calls
    that `kernel_takes` rejects run the reference, also where a kernel is attached.

    Shape: q_sem [B, H, T, Dsem], q_geo [B, H, T, Dgeo], T at most 8, one dtype; seqlens int32 [B]; n_packed int32
    [1] or [B]; returns [B, H, T, Dv] in q's dtype and fp32 [B, H, T], natural logarithms. With two disjoint parts
    of the keys, (o1, l1) and (o2, l2) merge to o1 exp(l1 - l) + o2 exp(l2 - l), l = log(exp(l1) + exp(l2)).

    There are no gradients.

    Raises:
        ConfigError: an argument of another shape, dtype, device or stride, or gradients that are wanted.

    Reference: Milakov and Gimelshein, 2018, arXiv:1805.02867 (online softmax); Dao et al., 2023, Flash-Decoding.
    """
    refuse_gradients("dba_decode", q_sem, q_geo, *(null or ()))
    kinds, sem, geo = [str(k_sem.kind), str(k_geo.kind)], k_sem.tensors, k_geo.tensors
    values: list[Tensor] = []
    if v is not None:
        kinds.append(str(v.kind))
        values = v.tensors
    extra = [] if null is None else list(null)
    span = span_of("dba_decode", window)
    given = (q_sem, q_geo, kinds, sem, geo, values, seqlens, n_packed, extra, span, max_seqlen, n_splits)
    if logger.is_debug and not torch.compiler.is_compiling():
        check_lengths([sem, geo, values], seqlens, n_packed)
    run = direct("dba_decode", q_sem, q_geo, sem[0], seqlens)
    if run is not None:
        return run(*given, admit=_admit)
    instead = _admit(*given)
    if instead is None or implementation("dba_decode", q_sem.device) == REFERENCE:
        return torch.ops.caramba.dba_decode.default(*given)
    return instead(*given)


def _admit(*given: Any) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Refuse what the op does not take; return what runs in the place of kernels, where they do not take it."""
    check_dba_decode(*given)
    q_sem, _, _, sem, geo, values = given[:6]
    widths = [parts[-1].shape[-1] for parts in (sem, geo, values) if parts]
    return None if kernel_takes(q_sem.dtype, widths) else reference_dba_decode


def _fake(*given: Any) -> tuple[Tensor, Tensor]:
    _, width = check_dba_decode(*given)
    q_sem = given[0]
    shape = q_sem.shape[:3]
    return q_sem.new_empty((*shape, width)), q_sem.new_empty(shape, dtype=torch.float32)


caramba_op(
    "dba_decode",
    fake=_fake,
    schema="(Tensor q_sem, Tensor q_geo, str[] kinds, Tensor[] k_sem, Tensor[] k_geo, Tensor[] v, Tensor seqlens, "
    "Tensor? n_packed, Tensor[] null, int window, int max_seqlen, int n_splits) -> (Tensor, Tensor)",
)(host_dba_decode)
