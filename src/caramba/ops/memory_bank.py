"""The op `caramba::memory_bank`: attention to a window of tokens and to gated memory slots, and its gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, upcast


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
    chunk: int = 32,
    bptt_chunks: int = 0,
) -> tuple[Tensor, MemoryState]:
    """Attend to the last `window` tokens and to memory slots that hold what has left the window, in one softmax.

    Query t writes token i = t - window before it reads: K_m = exp(decay_im) K_m + write_im slot_k_i, and V_m alike with
    v_i. It scores the window by q and k, the slots by slot_q and K; slots that nothing was written to are masked.
    Queries arrive scaled. The T queries are the last T of the S tokens; `state` holds what came before those S, and the
    state that comes back what the last query read. With `first`, the first token of each query's document (see
    `Documents`), a document sees neither tokens nor slots of the one before; then T = S and there is no state.

    Gradients pass from a chunk's reads to earlier writes within groups of `bptt_chunks` chunks, counted from the first
    query; 0 passes them through all. A group begins with a state that counts as constant.

    Work is linear in T: `chunk` queries at a time, with an intermediate of chunk x chunk x M per key/value head.

    Shape: q, slot_q [B, H, T, D]; k, slot_k [B, K, S, D], v [B, K, S, Dv]; decay, write [B, K, S, M]; first int64
    [B, T]. Returns [B, H, T, Dv] in q's dtype, contiguous, and the state.

    Raises:
        ConfigError: shapes that do not fit, or a state with `first`.

    Reference: Zhang et al., 2024, arXiv:2409.07146 (gated slots).
    """
    if state is None:
        state = MemoryState.empty(slot_k, v, decay.shape[-1])
    elif first is not None:
        raise ConfigError(
            "memory_bank: got a state and documents, expected one of them; start documents without a state"
        )
    _check(q, k, v, slot_q, slot_k, decay, write, state, first, window)
    out, *after = call_op(
        "memory_bank",
        q,
        k,
        v,
        slot_q,
        slot_k,
        decay,
        write,
        *state,
        first,
        window,
        max(1, min(chunk, q.shape[2])),
        bptt_chunks,
    )
    return out, MemoryState(*after)


def write_slots(state: MemoryState, slot_k: Tensor, v: Tensor, decay: Tensor, write: Tensor) -> MemoryState:
    """Return the state after writing tokens [B, K, S, ·] in order, without reading: no query sees the steps between."""
    total = upcast(decay).cumsum(2)
    weights = (total[:, :, -1:] - total).exp() * upcast(write)
    kept = total[:, :, -1].exp()
    return MemoryState(
        kept[..., None] * state.keys + torch.einsum("bksm,bksd->bkmd", weights, upcast(slot_k)),
        kept[..., None] * state.values + torch.einsum("bksm,bksd->bkmd", weights, upcast(v)),
        kept * state.mass + weights.sum(2),
    )


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
    chunk: int = 32,
) -> Tensor:
    """Return how much each head's queries read of each slot, probabilities summed over them.

    Arguments are those of `memory_bank`. Shape: [H, M].
    """
    given = MemoryState.empty(slot_k, v, decay.shape[-1]) if state is None else state
    x = _Inputs.of(q, k, v, slot_q, slot_k, decay, write)
    current, _ = _start(x, given, window)
    reads = x.k.new_zeros(q.shape[1], decay.shape[3])
    for place in _chunks(q.shape[2], k.shape[2], window, max(1, min(chunk, q.shape[2]))):
        gates = _gates(x, place, _resets(first, place, window))
        reads += _read(x, place, gates, current, window, first).slots.sum((0, 3)).flatten(0, 1)
        current = _advance(x, place, gates, current)
    return reads


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


class _Inputs(NamedTuple):
    """The op's tensors in at least float32; queries by key/value head, [B, K, G, T, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    slot_q: Tensor
    slot_k: Tensor
    decay: Tensor
    write: Tensor

    @classmethod
    def of(cls, *tensors: Tensor) -> _Inputs:
        q, k, v, slot_q, slot_k, decay, write = (upcast(x) for x in tensors)
        heads = (k.shape[1], -1)
        return cls(q.unflatten(1, heads), k, v, slot_q.unflatten(1, heads), slot_k, decay, write)


class _Chunk(NamedTuple):
    """Places of one chunk: its queries, the keys of their windows, and the tokens that they write.

    Query j of the chunk writes token j of `writes`, if `is_token`; in front of `n_before` there is none.
    """

    queries: slice
    window: slice
    writes: slice
    n_before: int


def _chunks(n_queries: int, n_keys: int, window: int, size: int) -> Iterator[_Chunk]:
    before = n_keys - n_queries
    for start in range(0, n_queries, size):
        end = min(start + size, n_queries)
        low, high = before + start - window, before + end - window
        yield _Chunk(
            slice(start, end),
            slice(max(low + 1, 0), before + end),
            slice(max(low, 0), max(high, 0)),
            min(max(-low, 0), end - start),
        )


class _Gates(NamedTuple):
    """How the steps of a chunk change the slots, [B, K, C, ...].

    After step j a slot holds `kept` [C, M] of the state before the chunk and `weights` [C, C, M] = `steps` * write of
    the tokens that the chunk writes.
    """

    kept: Tensor
    steps: Tensor
    weights: Tensor


def _padded(x: Tensor, place: _Chunk) -> Tensor:
    """Return the tokens that a chunk writes, zeros where there is none. Shape: [B, K, S, ·] to [B, K, C, ·]."""
    return torch.nn.functional.pad(x[:, :, place.writes], (0, 0, place.n_before, 0))


def _resets(first: Tensor | None, place: _Chunk, window: int) -> Tensor | None:
    """Return which steps write no token because it is of an earlier document, bool [B, C]; they empty the slots."""
    if first is None:
        return None
    steps = torch.arange(place.queries.start, place.queries.stop, device=first.device)
    return first[:, place.queries] > steps - window


def _gates(x: _Inputs, place: _Chunk, resets: Tensor | None) -> _Gates:
    decay, write = _padded(x.decay, place), _padded(x.write, place)
    if resets is not None:
        hidden = resets[:, None, :, None]
        decay, write = decay.masked_fill(hidden, 0), write.masked_fill(hidden, 0)
    total = decay.cumsum(2)
    n = total.shape[2]
    later = torch.ones(n, n, dtype=torch.bool, device=total.device).triu(1)[None]
    kept = total.exp()
    if resets is not None:
        runs = resets.cumsum(1)
        later = later | (runs[:, :, None] != runs[:, None])
        kept = kept.masked_fill((runs > 0)[:, None, :, None], 0)
    # Masked before the exponential: differences of later steps are positive and may overflow.
    gaps = (total[:, :, :, None] - total[:, :, None]).masked_fill(later[:, None, :, :, None], -math.inf)
    steps = gaps.exp()
    return _Gates(kept, steps, steps * write[:, :, None])


def _hidden(place: _Chunk, before: int, window: int, first: Tensor | None, device: torch.device) -> Tensor:
    """Return the mask of window keys that a query does not see, [1 or B, 1, 1, C, keys]."""
    queries = torch.arange(place.queries.start, place.queries.stop, device=device)[:, None] + before
    keys = torch.arange(place.window.start, place.window.stop, device=device)
    hidden = (keys > queries) | (keys <= queries - window)
    hidden = hidden[None] if first is None else hidden | (keys < first[:, place.queries, None])
    return hidden[:, None, None]


class _Read(NamedTuple):
    """What a chunk's queries read: probabilities of window and slots, and the slots' scores from the state alone."""

    window: Tensor
    slots: Tensor
    of_state: Tensor
    products: Tensor


def _read(
    x: _Inputs, place: _Chunk, gates: _Gates, state: MemoryState, window: int, first: Tensor | None
) -> _Read:
    q, slot_q = x.q[:, :, :, place.queries], x.slot_q[:, :, :, place.queries]
    before = x.k.shape[2] - x.q.shape[3]
    scores = torch.einsum("bkgcd,bksd->bkgcs", q, x.k[:, :, place.window])
    scores = scores.masked_fill(_hidden(place, before, window, first, q.device), -math.inf)
    of_state = torch.einsum("bkgcd,bkmd->bkgcm", slot_q, state.keys)
    products = torch.einsum("bkgcd,bkid->bkgci", slot_q, _padded(x.slot_k, place))
    weights = gates.weights
    slots = gates.kept[:, :, None] * of_state + torch.einsum("bkgci,bkcim->bkgcm", products, weights)
    mass = gates.kept * state.mass[:, :, None] + weights.sum(3)
    slots = slots.masked_fill((mass <= 0)[:, :, None], -math.inf)
    # A query of window 0 before the first write sees nothing; it reads zeros.
    p = torch.cat((scores, slots), dim=-1).softmax(-1).nan_to_num(nan=0.0)
    return _Read(p[..., : scores.shape[-1]], p[..., scores.shape[-1] :], of_state, products)


def _advance(x: _Inputs, place: _Chunk, gates: _Gates, state: MemoryState) -> MemoryState:
    """Return the state after a chunk's last step."""
    kept, weights = gates.kept[:, :, -1], gates.weights[:, :, -1]
    return MemoryState(
        kept[..., None] * state.keys + torch.einsum("bkim,bkid->bkmd", weights, _padded(x.slot_k, place)),
        kept[..., None] * state.values + torch.einsum("bkim,bkid->bkmd", weights, _padded(x.v, place)),
        kept * state.mass + weights.sum(2),
    )


def _start(x: _Inputs, state: MemoryState, window: int) -> tuple[MemoryState, int]:
    """Write what has left the window before the first query's step; return the state and how many tokens those are."""
    n_before = max(x.k.shape[2] - x.q.shape[3] - window, 0)
    if n_before == 0:
        return state, 0
    tokens = (y[:, :, :n_before] for y in (x.slot_k, x.v, x.decay, x.write))
    return write_slots(state, *tokens), n_before


def _fake_memory_bank(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    keys, values, mass = (x.new_empty(x.shape) for x in rest[4:7])
    return q.new_empty((*q.shape[:3], v.shape[3])), keys, values, mass


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(output[3])
    *tensors, ctx.window, ctx.chunk, ctx.bptt_chunks = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor, grad_keys: Tensor, grad_values: Tensor, _: Tensor) -> tuple[Any, ...]:
    given = (grad, grad_keys, grad_values, *ctx.saved_tensors, ctx.window, ctx.chunk, ctx.bptt_chunks)
    found = torch.ops.caramba.memory_bank_backward.default(*given)
    return *found, None, None, None, None, None


@caramba_op("memory_bank", fake=_fake_memory_bank, setup=_setup, backward=_backward, takes_kernel=False)
def reference_memory_bank(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_q: Tensor,
    slot_k: Tensor,
    decay: Tensor,
    write: Tensor,
    keys: Tensor,
    values: Tensor,
    mass: Tensor,
    first: Tensor | None,
    window: int,
    chunk: int,
    bptt_chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the op in plain PyTorch, chunk by chunk."""
    x = _Inputs.of(q, k, v, slot_q, slot_k, decay, write)
    state, _ = _start(x, MemoryState(keys, values, mass), window)
    outputs = []
    for place in _chunks(q.shape[2], k.shape[2], window, chunk):
        gates = _gates(x, place, _resets(first, place, window))
        p = _read(x, place, gates, state, window, first)
        by_token = torch.einsum("bkgcm,bkcim->bkgci", p.slots, gates.weights)
        outputs.append(
            torch.einsum("bkgcs,bksd->bkgcd", p.window, x.v[:, :, place.window])
            + torch.einsum("bkgcm,bkmd->bkgcd", p.slots * gates.kept[:, :, None], state.values)
            + torch.einsum("bkgci,bkid->bkgcd", by_token, _padded(x.v, place))
        )
        state = _advance(x, place, gates, state)
    out = torch.cat(outputs, dim=3).flatten(1, 2).to(q.dtype).contiguous()
    # An op returns no input: where no chunk wrote anything the state is still a copy.
    return out, state.keys.clone(), state.values.clone(), state.mass.clone()


@caramba_op(
    "memory_bank_backward",
    fake=lambda *given: tuple(x.new_empty(x.shape) for x in given[3:12]),
    takes_kernel=False,
)
def reference_memory_bank_backward(
    grad: Tensor,
    grad_keys: Tensor,
    grad_values: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slot_q: Tensor,
    slot_k: Tensor,
    decay: Tensor,
    write: Tensor,
    keys: Tensor,
    values: Tensor,
    mass: Tensor,
    first: Tensor | None,
    window: int,
    chunk: int,
    bptt_chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of all inputs but `mass`, chunks in reverse, from states that are computed again."""
    given = (q, k, v, slot_q, slot_k, decay, write, keys, values)
    x = _Inputs.of(*given[:7])
    grads = _Inputs(*(torch.zeros_like(y) for y in x))
    grad = upcast(grad).unflatten(1, (k.shape[1], -1))
    state, n_before = _start(x, MemoryState(keys, values, mass), window)
    places = list(_chunks(q.shape[2], k.shape[2], window, chunk))
    states = []
    for place in places:
        states.append(state)
        state = _advance(x, place, _gates(x, place, _resets(first, place, window)), state)
    after = (upcast(grad_keys), upcast(grad_values))
    for index in reversed(range(len(places))):
        place, state = places[index], states[index]
        after = _chunk_backward(x, grads, grad[:, :, :, place.queries], after, place, state, window, first)
        if bptt_chunks and index and index % bptt_chunks == 0:
            after = (torch.zeros_like(after[0]), torch.zeros_like(after[1]))
    after = _write_backward(x, grads, after, MemoryState(keys, values, mass), n_before)
    found = (grads.q.flatten(1, 2), grads.k, grads.v, grads.slot_q.flatten(1, 2), *grads[4:], *after)
    a, b, c, d, e, f, g, h, i = (y.to(x.dtype).contiguous() for y, x in zip(found, given, strict=True))
    return a, b, c, d, e, f, g, h, i


def _chunk_backward(
    x: _Inputs,
    grads: _Inputs,
    grad: Tensor,
    after: tuple[Tensor, Tensor],
    place: _Chunk,
    state: MemoryState,
    window: int,
    first: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Add a chunk's gradients to `grads`; return those of the state before it."""
    resets = _resets(first, place, window)
    gates = _gates(x, place, resets)
    weights, kept = gates.weights, gates.kept[:, :, None]
    p = _read(x, place, gates, state, window, first)
    q, slot_q = x.q[:, :, :, place.queries], x.slot_q[:, :, :, place.queries]
    slot_k, v, v_window = _padded(x.slot_k, place), _padded(x.v, place), x.v[:, :, place.window]
    # Gradients of the scores: through the softmax, from what each probability multiplies.
    through_window = torch.einsum("bkgcd,bksd->bkgcs", grad, v_window)
    of_values = torch.einsum("bkgcd,bkmd->bkgcm", grad, state.values)
    v_products = torch.einsum("bkgcd,bkid->bkgci", grad, v)
    through_slots = kept * of_values + torch.einsum("bkgci,bkcim->bkgcm", v_products, weights)
    total = (p.window * through_window).sum(-1, True) + (p.slots * through_slots).sum(-1, True)
    by_window, by_slot = p.window * (through_window - total), p.slots * (through_slots - total)
    # The window.
    grads.q[:, :, :, place.queries] += torch.einsum("bkgcs,bksd->bkgcd", by_window, x.k[:, :, place.window])
    grads.k[:, :, place.window] += torch.einsum("bkgcs,bkgcd->bksd", by_window, q)
    grads.v[:, :, place.window] += torch.einsum("bkgcs,bkgcd->bksd", p.window, grad)
    # The slots: their state before the chunk, and what the chunk writes.
    by_token = torch.einsum("bkgcm,bkcim->bkgci", by_slot, weights)
    grads.slot_q[:, :, :, place.queries] += torch.einsum(
        "bkgcm,bkmd->bkgcd", by_slot * kept, state.keys
    ) + torch.einsum("bkgci,bkid->bkgcd", by_token, slot_k)
    last, last_kept = weights[:, :, -1], gates.kept[:, :, -1]
    grad_k = torch.einsum("bkgci,bkgcd->bkid", by_token, slot_q)
    grad_k += torch.einsum("bkim,bkmd->bkid", last, after[0])
    p_token = torch.einsum("bkgcm,bkcim->bkgci", p.slots, weights)
    grad_v = torch.einsum("bkgci,bkgcd->bkid", p_token, grad)
    grad_v += torch.einsum("bkim,bkmd->bkid", last, after[1])
    # The gates.
    grad_weights = torch.einsum("bkgcm,bkgci->bkcim", by_slot, p.products)
    grad_weights += torch.einsum("bkgcm,bkgci->bkcim", p.slots, v_products)
    grad_weights[:, :, -1] += torch.einsum("bkid,bkmd->bkim", slot_k, after[0])
    grad_weights[:, :, -1] += torch.einsum("bkid,bkmd->bkim", v, after[1])
    grad_kept = (by_slot * p.of_state + p.slots * of_values).sum(2)
    grad_kept[:, :, -1] += (state.keys * after[0]).sum(-1) + (state.values * after[1]).sum(-1)
    by_gap = grad_weights * weights
    grad_total = by_gap.sum(3) - by_gap.sum(2) + grad_kept * gates.kept
    grad_decay = grad_total.flip(2).cumsum(2).flip(2)
    grad_write = (grad_weights * gates.steps).sum(2)
    if resets is not None:
        hidden = resets[:, None, :, None]
        grad_decay, grad_write = grad_decay.masked_fill(hidden, 0), grad_write.masked_fill(hidden, 0)
    pairs = (
        (grads.slot_k, grad_k),
        (grads.v, grad_v),
        (grads.decay, grad_decay),
        (grads.write, grad_write),
    )
    for into, found in pairs:
        into[:, :, place.writes] += found[:, :, place.n_before :]
    return (
        torch.einsum("bkgcm,bkgcd->bkmd", by_slot * kept, slot_q) + last_kept[..., None] * after[0],
        torch.einsum("bkgcm,bkgcd->bkmd", p.slots * kept, grad) + last_kept[..., None] * after[1],
    )


def _write_backward(
    x: _Inputs, grads: _Inputs, after: tuple[Tensor, Tensor], state: MemoryState, n_tokens: int
) -> tuple[Tensor, Tensor]:
    """Add the gradients of the tokens that `_start` wrote; return those of the state before them."""
    if n_tokens == 0:
        return after
    slot_k, v, decay, write = (y[:, :, :n_tokens] for y in (x.slot_k, x.v, x.decay, x.write))
    total = decay.cumsum(2)
    steps, kept = (total[:, :, -1:] - total).exp(), total[:, :, -1].exp()
    weights = steps * write
    grads.slot_k[:, :, :n_tokens] += torch.einsum("bksm,bkmd->bksd", weights, after[0])
    grads.v[:, :, :n_tokens] += torch.einsum("bksm,bkmd->bksd", weights, after[1])
    grad_weights = torch.einsum("bksd,bkmd->bksm", slot_k, after[0]) + torch.einsum(
        "bksd,bkmd->bksm", v, after[1]
    )
    grads.write[:, :, :n_tokens] += grad_weights * steps
    by_gap = grad_weights * weights
    grad_kept = ((state.keys * after[0]).sum(-1) + (state.values * after[1]).sum(-1)) * kept
    # A step's decay acts on the state and on every earlier token.
    grads.decay[:, :, :n_tokens] += grad_kept[:, :, None] + by_gap.cumsum(2) - by_gap
    return kept[..., None] * after[0], kept[..., None] * after[1]
