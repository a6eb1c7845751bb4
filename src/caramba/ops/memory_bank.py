"""Attention to a window of tokens and to gated memory slots, of plain PyTorch and `prefix_attention`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from caramba.config.memory_bank import LONGEST_CHUNK
from caramba.errors import ConfigError
from caramba.ops.backend import upcast
from caramba.ops.prefix_attention import attend_with_prefix, prefix_attention

LOWEST = -4.0
"""Log of the share of its content that a slot keeps of a step, at least; lower ones count as this.

Exponents of half a chunk's decays then stay within 64, far from the ends of float32.
"""
GROUP = 16
"""Chunks whose states are computed from one another at once."""
NOTHING = -1e30
"""Log-sum-exp of queries that see no written slot, finite so that no gradient is NaN."""


class MemoryState(NamedTuple):
    """The slots of every sequence: keys [B, K, M, D], values [B, K, M, Dv], written mass [B, K, M]."""

    keys: Tensor
    values: Tensor
    mass: Tensor

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, slots: int) -> MemoryState:
        """Return empty slots for keys and values [B, K, S, ·]."""
        dtype, (batch, heads) = torch.promote_types(k.dtype, torch.float32), k.shape[:2]
        return cls(
            k.new_zeros((batch, heads, slots, k.shape[-1]), dtype=dtype),
            v.new_zeros((batch, heads, slots, v.shape[-1]), dtype=dtype),
            k.new_zeros((batch, heads, slots), dtype=dtype),
        )


class SlotRead(NamedTuple):
    """What queries read of the slots alone, in at least float32.

    Attributes:
        out: normalised over the slots, [B, H, T, Dv]; zeros where nothing was written.
        lse: log-sum-exp of the scores, [B, H, T, 1]; `NOTHING` there.
        p: probabilities, [B, H, T, M].
        state: what the last query read.
    """

    out: Tensor
    lse: Tensor
    p: Tensor
    state: MemoryState


def memory_bank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_q: Tensor,
    slot_k: Tensor,
    decay: Tensor,
    write: Tensor,
    *,
    window: int,
    state: MemoryState | None = None,
    first: Tensor | None = None,
    chunk: int = LONGEST_CHUNK,
    bptt_chunks: int = 0,
    share: Tensor | None = None,
    slot_bias: Tensor | None = None,
) -> tuple[Tensor, MemoryState]:
    """Attend to the last `window` tokens and to memory slots that hold what has left it, in one softmax.

    Query t writes token i = t - window before it reads: K_m = exp(decay_im) K_m + write_im slot_k_i, and V_m alike with
    v_i. It scores the window by q and k, the slots by slot_q and K; slots that nothing was written to are masked.
    Queries arrive scaled. The T queries are the last T of the S tokens; `state` holds what came before those S, and the
    state that comes back what the last query read. With `first`, the first token of each query's document (see
    `Documents`), a document sees neither tokens nor slots of the one before; then T = S and there is no state.

    With `share` window and slots have a softmax each: (1 - share) of the window's + share of the slots'; slots that
    nothing was written to leave the window alone. `slot_bias` is added to the scores of the slots.

    Gradients pass from a chunk's reads to earlier writes within groups of `bptt_chunks` chunks, counted from the first
    query; 0 passes them through all. A group begins with a state that counts as constant.

    Work and memory are linear in T. Decays are at most 0; those below `LOWEST` count as `LOWEST`, and chunks longer
    than `LONGEST_CHUNK` queries as `LONGEST_CHUNK`.

    Shape: q, slot_q [B, H, T, D]; k, slot_k [B, K, S, D], v [B, K, S, Dv]; decay, write [B, K, S, M]; first int64
    [B, T]; share [H]; slot_bias [K, M]. Returns [B, H, T, Dv] in q's dtype, and the state.

    Raises:
        ConfigError: shapes that do not fit, or a state with `first`.

    Reference: Zhang et al., 2024, arXiv:2409.07146 (gated slots); Munkhdalai et al., 2024, arXiv:2404.07143 (the share
    of a head).
    """
    if state is None:
        state = MemoryState.empty(slot_k, v, decay.shape[-1])
    elif first is not None:
        raise ConfigError(
            "memory_bank: got a state and documents, expected one of them; start documents without a state"
        )
    _check(q, k, v, slot_q, slot_k, decay, write, state, first, window)
    with torch.autocast(q.device.type, enabled=False):
        options: dict[str, Any] = {"state": state, "first": first, "chunk": chunk, "slot_bias": slot_bias}
        slots = read_slots(slot_q, slot_k, v, decay, write, window=window, **options, bptt_chunks=bptt_chunks)
        if window == 0:
            return slots.out.to(q.dtype), slots.state
        if share is None:
            return prefix_attention(q, k, v, slots.out.to(q.dtype), slots.lse, window, first), slots.state
        nothing = torch.zeros_like(slots.out, dtype=q.dtype), torch.full_like(slots.lse, NOTHING)
        near = prefix_attention(q, k, v, *nothing, window, first)
        mix = share[:, None, None] * (slots.lse > NOTHING / 2)
        return torch.lerp(near.to(mix.dtype), slots.out.to(mix.dtype), mix).to(q.dtype), slots.state


def memory_bank_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_q: Tensor,
    state: MemoryState,
    is_hidden: Tensor,
    share: Tensor | None = None,
    slot_bias: Tensor | None = None,
) -> Tensor:
    """Return `memory_bank` of one query that writes nothing, on keys in any order.

    Shape: q, slot_q [B, H, 1, D]; k [B, K, S, D], v [B, K, S, Dv]; is_hidden bool [S], keys that count for nothing;
    share [H]; slot_bias [K, M]. Returns [B, H, 1, Dv] in v's dtype.
    """
    with torch.autocast(q.device.type, enabled=False):
        groups, n_keys = (k.shape[1], -1), k.shape[2]
        q, slot_q = (upcast(x[:, :, 0]).unflatten(1, groups) for x in (q, slot_q))
        near = (q @ upcast(k).mT).masked_fill(is_hidden, -torch.inf)
        far = _slot_scores(slot_q, state, slot_bias)
        if share is None:
            p = torch.cat((near, far), dim=-1).softmax(-1)
            out = upcast(p[..., :n_keys].to(v.dtype) @ v) + p[..., n_keys:] @ state.values
        else:
            of_window = upcast(near.softmax(-1).to(v.dtype) @ v)
            has_slots = (state.mass > 0).any(-1)[..., None, None]
            out = torch.lerp(of_window, far.softmax(-1) @ state.values, share.view(*groups, 1) * has_slots)
        return out.flatten(1, 2)[:, :, None].to(v.dtype)


def slot_reads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_q: Tensor,
    slot_k: Tensor,
    decay: Tensor,
    write: Tensor,
    *,
    window: int,
    state: MemoryState | None = None,
    first: Tensor | None = None,
    chunk: int = LONGEST_CHUNK,
    share: Tensor | None = None,
    slot_bias: Tensor | None = None,
) -> Tensor:
    """Return how much each head's queries read of each slot, probabilities summed over them.

    Arguments are those of `memory_bank`, with a window of 1 or more. Shape: [H, M].
    """
    options: dict[str, Any] = {"state": state, "first": first, "chunk": chunk, "slot_bias": slot_bias}
    slots = read_slots(slot_q, slot_k, v, decay, write, window=window, **options)
    if share is not None:
        part = share[:, None, None] * (slots.lse > NOTHING / 2)
    else:
        _, total = attend_with_prefix(q, k, v, slots.out, slots.lse, window, first)
        part = (slots.lse - total).exp()
    return (slots.p * part).sum((0, 2))


def write_slots(state: MemoryState, slot_k: Tensor, v: Tensor, decay: Tensor, write: Tensor) -> MemoryState:
    """Return the state after writing tokens [B, K, S, ·] in order, without reading: no query sees the steps between."""
    total = upcast(decay).clamp_min(LOWEST).cumsum(2)
    weights = (total[:, :, -1:] - total).exp() * upcast(write)
    kept = total[:, :, -1].exp()
    return MemoryState(
        kept[..., None] * state.keys + weights.mT @ upcast(slot_k),
        kept[..., None] * state.values + weights.mT @ upcast(v),
        kept * state.mass + weights.sum(2),
    )


def _slot_scores(q: Tensor, state: MemoryState, slot_bias: Tensor | None) -> Tensor:
    """Return the scores of one query a head, [B, K, G, D] to [B, K, G, M]; `NOTHING` where nothing was written."""
    scores = q @ state.keys.mT
    if slot_bias is not None:
        scores = scores + slot_bias[:, None]
    return scores.masked_fill((state.mass <= 0)[:, :, None], NOTHING)


def write_slots_(state: MemoryState, slot_k: Tensor, v: Tensor, decay: Tensor, write: Tensor) -> None:
    """Write one token [B, K, 1, ·] in place, as `write_slots` does. Decays are at least `LOWEST`."""
    kept, write = decay.exp().mT, write.mT
    state.keys.mul_(kept).addcmul_(write, upcast(slot_k))
    state.values.mul_(kept).addcmul_(write, upcast(v))
    state.mass.mul_(kept[..., 0]).add_(write[..., 0])


def read_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Tensor,
    *,
    window: int,
    state: MemoryState | None = None,
    first: Tensor | None = None,
    chunk: int = LONGEST_CHUNK,
    bptt_chunks: int = 0,
    slot_bias: Tensor | None = None,
) -> SlotRead:
    """Return what queries read of the slots by a softmax of their own.

    With totals of log decays t within a chunk, query j scores slot m by exp(t_jm) q_j . K_m of the state K before the
    chunk, plus the sum over steps i <= j of (q_j . k_i) exp(t_jm - t_im) write_im. The exponential is the product of
    exp(t_jm - r_m) and exp(r_m - t_im) with the total r of the chunk's middle, so that both sums are matrix products.

    Arguments are those of `memory_bank`, q and k its slot_q and slot_k.

    Reference: Yang et al., 2023, arXiv:2312.06635 (chunks of gated linear attention).
    """
    # Products of bfloat16 stay in it; float16 ends before exp(64).
    if q.dtype != torch.bfloat16:
        q, k, v = (upcast(x) for x in (q, k, v))
    decay, write = upcast(decay), upcast(write)
    q = q.unflatten(1, (k.shape[1], -1))
    state = MemoryState.empty(k, v, decay.shape[-1]) if state is None else state
    n_queries = q.shape[3]
    # Tokens that leave the window before the first query's step; one query also writes its own here.
    n_before = max(k.shape[2] - n_queries - window + (n_queries == 1), 0)
    if n_before:
        state = write_slots(state, *(x[:, :, :n_before] for x in (k, v, decay, write)))
    if n_queries == 1:
        scores = _slot_scores(upcast(q[:, :, :, 0]), state, slot_bias)
        p = scores.softmax(-1)
        found = (p @ state.values, scores.logsumexp(-1, keepdim=True), p)
        out, lse, p = (x.flatten(1, 2)[:, :, None] for x in found)
        return SlotRead(out, lse, p, state)
    layout = _Layout(n_queries, k.shape[2], window, min(max(chunk, 1), LONGEST_CHUNK, n_queries))
    k, v, decay, write = (layout.written(x) for x in (k, v, decay.clamp_min(LOWEST), write))
    resets = layout.resets(first)
    return _read_chunks(layout, layout.chunks(q), k, v, decay, write, state, resets, bptt_chunks, slot_bias)


def _read_chunks(
    layout: _Layout,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Tensor,
    state: MemoryState,
    resets: Tensor | None,
    bptt_chunks: int,
    slot_bias: Tensor | None,
) -> SlotRead:
    """Read by chunks. Shape: q [B, K, G, N, C, D]; k, v, decay and write [B, K, N, C, ·], what queries write."""
    q, groups = q.transpose(2, 3).flatten(3, 4), (q.shape[2], layout.chunk)
    hidden = torch.ones(layout.chunk, layout.chunk, dtype=torch.bool, device=q.device).triu(1)
    if resets is not None:
        decay, write = decay.masked_fill(resets, 0), write.masked_fill(resets, 0)
    total = decay.cumsum(3)
    middle = total[:, :, :, (layout.chunk - 1) // 2, None].detach()
    up, weights = (total - middle).exp(), (middle - total).exp() * write
    kept, last, ends = total.exp(), total[:, :, :, -1], weights * up[:, :, :, -1:]
    if resets is not None:
        runs = resets.cumsum(3)
        hidden = hidden | (runs != runs.mT)
        kept, ends = kept.masked_fill(runs > 0, 0), ends.masked_fill(runs < runs[:, :, :, -1:], 0)
        last = last.masked_fill(runs[:, :, :, -1] > 0, -torch.inf)
    # The states before each chunk, and the one after all. Their mass has no gradient; in one recurrence with the rest,
    # aligned to 136 columns from 128, it made a training step on an H200 12% longer (docs/log.md).
    cut, dtype = bptt_chunks if bptt_chunks < last.shape[2] else 0, q.dtype
    widths = (k.shape[-1], v.shape[-1])
    start = torch.cat((state.keys, state.values), dim=-1)
    before, after = _states_and_end(last, ends.to(dtype).mT @ torch.cat((k, v), dim=-1), start, cut)
    keys, values = (x.to(dtype) for x in before.split(widths, dim=-1))
    with torch.no_grad():
        mass, mass_after = _states_and_end(last, ends.sum(3)[..., None], state.mass[..., None], cut)
        seen = weights.new_ones(()).masked_fill(hidden, 0)
        is_empty = kept * mass.mT + up * (seen @ weights) <= 0
    # Masked by selection, not by products: what is hidden may have overflowed.
    hidden = hidden[..., None, :, :]
    is_empty, kept, up = (x[:, :, :, None] for x in (is_empty, kept, up))
    weights = weights.to(dtype)
    products = (q @ k.mT).unflatten(3, groups).masked_fill(hidden, 0).flatten(3, 4)
    scores = kept * (q @ keys.mT).unflatten(3, groups)
    scores = torch.addcmul(scores, up, upcast(products @ weights).unflatten(3, groups))
    if slot_bias is not None:
        scores = scores + slot_bias[:, None, None, None]
    scores = scores.masked_fill(is_empty, NOTHING)
    p = scores.softmax(-1)
    by_token = ((p * up).to(dtype).flatten(3, 4) @ weights.mT).unflatten(3, groups)
    by_token = by_token.masked_fill(hidden, 0).flatten(3, 4)
    out = upcast((p * kept).to(dtype).flatten(3, 4) @ values) + by_token @ v
    found = (out.unflatten(3, groups), scores.logsumexp(-1, keepdim=True), p)
    out, lse, p = (x.transpose(2, 3).flatten(3, 4)[:, :, :, : layout.n_queries].flatten(1, 2) for x in found)
    keys, values = after.split(widths, dim=-1)
    return SlotRead(out, lse, p, MemoryState(keys, values, mass_after[..., 0]))


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_q: Tensor,
    slot_k: Tensor,
    decay: Tensor,
    write: Tensor,
    state: MemoryState,
    first: Tensor | None,
    window: int,
) -> None:
    if q.dim() != 4 or k.dim() != 4 or decay.dim() != 4 or q.shape[1] % k.shape[1]:
        raise ConfigError(
            f"memory_bank: got q {tuple(q.shape)}, k {tuple(k.shape)}, decay {tuple(decay.shape)}; expected "
            "[B, H, T, D], [B, K, S, D] and [B, K, S, M] with K a divisor of H"
        )
    batch, _, n_queries, width = q.shape
    heads, n_keys, slots = k.shape[1], k.shape[2], decay.shape[3]
    expected = {
        "slot_q": (slot_q, q.shape),
        "k": (k, (batch, heads, n_keys, width)),
        "slot_k": (slot_k, k.shape),
        "v": (v, (batch, heads, n_keys, v.shape[-1])),
        "decay": (decay, (batch, heads, n_keys, slots)),
        "write": (write, decay.shape),
        "state.keys": (state.keys, (batch, heads, slots, width)),
        "state.values": (state.values, (batch, heads, slots, v.shape[-1])),
        "state.mass": (state.mass, (batch, heads, slots)),
    }
    if first is not None:
        expected["first"] = (first, (batch, n_queries))
    for name, (x, shape) in expected.items():
        if x.shape != shape:
            raise ConfigError(f"memory_bank: {name} is {tuple(x.shape)}, expected {tuple(shape)}")
    if n_queries > n_keys or window < 0 or (first is not None and n_queries != n_keys):
        raise ConfigError(
            f"memory_bank: {n_queries} queries on {n_keys} keys, window {window}; expected no more queries than keys, "
            "as many with documents, and a window of 0 or more"
        )


class _Layout:
    """Chunks of T queries on S keys, padded to whole ones, and the token that each query writes."""

    def __init__(self, n_queries: int, n_keys: int, window: int, chunk: int) -> None:
        before = n_keys - n_queries
        self.n_queries, self.window, self.chunk = n_queries, window, chunk
        self.padding = -n_queries % chunk
        # Query t writes token t + before - window; the first have none.
        self.n_without = min(max(window - before, 0), n_queries)
        self.writes = slice(max(before - window, 0), max(n_keys - window, 0))

    def chunks(self, x: Tensor) -> Tensor:
        """Cut what belongs to the queries. Shape: [..., T, E] to [..., N, C, E], zeros at the end."""
        return F.pad(x, (0, 0, 0, self.padding)).unflatten(-2, (-1, self.chunk))

    def written(self, x: Tensor) -> Tensor:
        """Return the token that each query writes. Shape: [B, K, S, E] to [B, K, N, C, E]."""
        return self.chunks(F.pad(x[:, :, self.writes], (0, 0, self.n_without, 0)))

    def resets(self, first: Tensor | None) -> Tensor | None:
        """Return which steps write no token because it is of an earlier document, bool [B, 1, N, C, 1].

        They empty the slots.
        """
        if first is None:
            return None
        is_earlier = first > torch.arange(self.n_queries, device=first.device) - self.window
        return self.chunks(is_earlier[:, None, :, None])


def _states_and_end(log_kept: Tensor, added: Tensor, start: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """Return the states before each update, and the one after all."""
    before = _states(log_kept, added, start, cut)
    return before, log_kept[:, :, -1, :, None].exp() * before[:, :, -1] + added[:, :, -1]


def _states(log_kept: Tensor, added: Tensor, start: Tensor | None, cut: int = 0) -> Tensor:
    """Return the states before each of N updates, state = exp(log_kept) state + added.

    Groups of updates run from nothing, then the groups' own starts follow alike. With `cut` groups have that
    many updates, and all starts but the first are constants.

    Shape: log_kept [B, K, N, M], minus infinity where a state begins again; added [B, K, N, M, E]; start [B, K, M, E],
    or None for zeros. Returns [B, K, N, M, E].
    """
    n = log_kept.shape[2]
    if n <= GROUP and not cut:
        # Sums from one update to another one, each by itself: differences of totals would lose digits.
        places = torch.arange(n, device=log_kept.device)
        is_after = places[:, None] > places
        sums = log_kept[:, :, :, None].masked_fill(~is_after[..., None], 0).cumsum(2)
        steps = sums.masked_fill((places[:, None] < places)[..., None], -torch.inf).exp()
        steps = F.pad(steps, (0, 0, 0, 0, 1, -1)).to(added.dtype)
        found = torch.einsum("bkjim,bkime->bkjme", steps, added)
        return found if start is None else found + _passed(log_kept) * start[:, :, None]
    size = cut or GROUP
    padding = -n % size
    log_kept = F.pad(log_kept, (0, 0, 0, padding)).unflatten(2, (-1, size))
    added = F.pad(added, (0, 0, 0, 0, 0, padding)).unflatten(2, (-1, size))
    found = _states(log_kept.flatten(1, 2), added.flatten(1, 2), None).unflatten(1, added.shape[1:3])
    ends = log_kept[:, :, :, -1, :, None].exp() * found[:, :, :, -1] + added[:, :, :, -1]
    starts = _states(log_kept.sum(3), ends, start)
    if cut:
        starts = torch.cat((starts[:, :, :1], starts[:, :, 1:].detach()), dim=2)
    passed = _passed(log_kept.flatten(1, 2)).unflatten(1, added.shape[1:3])
    return (found + passed * starts[:, :, :, None]).flatten(2, 3)[:, :, :n]


def _passed(log_kept: Tensor) -> Tensor:
    """Return the share of a start that is left before each update. Shape: [B, K, N, M] to [B, K, N, M, 1]."""
    return F.pad(log_kept, (0, 0, 1, -1)).cumsum(2).exp()[..., None]
