"""The op `caramba::memory_bank`: attention to a window of tokens and to gated memory slots, and its gradient."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from caramba.errors import ConfigError
from caramba.ops.backend import call_op, caramba_op, upcast

PARTS = 4
"""Blocks of queries a window. More of them see fewer keys in vain, and take more launches."""


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

    Work and memory are linear in T: T x chunk x M per key/value head, and T x 1.25 window per head.

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
    p = _Pass.of(x, current, first, window, max(1, min(chunk, q.shape[2]))).read
    return p.slots.flatten(3, 4)[:, :, :, : q.shape[2]].sum((0, 3)).flatten(0, 1)


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


class _Layout:
    """Places of T queries on S keys: padded to whole blocks of the window, which are whole chunks of the slots.

    A block of queries sees its own keys and the `reach` before them.
    """

    def __init__(self, x: _Inputs, window: int, chunk: int) -> None:
        self.n_queries, self.n_keys, self.window, self.chunk = x.q.shape[3], x.k.shape[2], window, chunk
        self.before = self.n_keys - self.n_queries
        self.block = chunk * max(1, min(-(-window // (PARTS * chunk)), -(-self.n_queries // chunk)))
        self.padding = -self.n_queries % self.block
        self.reach = max(window, 1) - 1
        # Query t writes token t + before - window; the first have none.
        self.n_without = min(max(window - self.before, 0), self.n_queries)
        self.writes = slice(max(self.before - window, 0), max(self.n_keys - window, 0))

    def blocks(self, x: Tensor, size: int) -> Tensor:
        """Cut what belongs to the queries. Shape: [..., T, E] to [..., N, size, E], zeros at the end."""
        return F.pad(x, (0, 0, 0, self.padding)).unflatten(-2, (-1, size))

    def written(self, x: Tensor) -> Tensor:
        """Return the token that each query writes. Shape: [B, K, S, E] to [B, K, N, C, E]."""
        return self.blocks(F.pad(x[:, :, self.writes], (0, 0, self.n_without, 0)), self.chunk)

    def add_written(self, into: Tensor, found: Tensor) -> None:
        """Add to tokens [B, K, S, E] what was found for those that queries write, [B, K, N, C, E]."""
        into[:, :, self.writes] += found.flatten(2, 3)[:, :, self.n_without : self.n_queries]

    def windows(self, x: Tensor) -> Tensor:
        """Return the keys of each block. Shape: [B, K, S, E] to [B, K, N, L, E]."""
        x = F.pad(x, (0, 0, self.reach, self.padding))[:, :, self.before :]
        return x.unfold(2, self.block + self.reach, self.block).mT

    def add_windows(self, into: Tensor, found: Tensor) -> None:
        """Add to keys [B, K, S, E] what was found for those of each block, [B, K, N, L, E]."""
        n, size, width = found.shape[2], self.block, found.shape[3]
        summed = found.new_zeros((*found.shape[:2], n * size + width, found.shape[-1]))
        for start in range(0, width, size):
            part = found[:, :, :, start : start + size]
            part = F.pad(part, (0, 0, 0, size - part.shape[3])).flatten(2, 3)
            place = slice(start, min(start + n * size, summed.shape[2]))
            summed[:, :, place] += part[:, :, : place.stop - start]
        low = max(self.before - self.reach, 0)
        place = low - (self.before - self.reach)
        into[:, :, low:] += summed[:, :, place : place + self.n_keys - low]

    def hidden(self, first: Tensor | None, device: torch.device) -> Tensor:
        """Return the mask of keys that a query does not see, [1 or B, 1, 1, N, block, L]."""
        queries = torch.arange(self.n_queries + self.padding, device=device).unflatten(0, (-1, self.block))
        keys = queries[:, :1] + torch.arange(-self.reach, self.block, device=device)
        queries, keys = queries[:, :, None] + self.before, keys[:, None] + self.before
        hidden = ((keys > queries) | (keys <= queries - self.window) | (keys < 0))[None]
        if first is not None:
            hidden = hidden | (keys < self.blocks(first[..., None], self.block))
        return hidden[:, None, None]

    def resets(self, first: Tensor | None) -> Tensor | None:
        """Return which steps write no token because it is of an earlier document, bool [B, 1, N, C, 1].

        They empty the slots.
        """
        if first is None:
            return None
        is_earlier = first > torch.arange(self.n_queries, device=first.device) - self.window
        return self.blocks(is_earlier[:, None, :, None], self.chunk)


class _Gates(NamedTuple):
    """How the steps of each chunk change the slots, [B, K, N, C, ...].

    After step j a slot holds `kept` [C, M] of the state before the chunk and `weights` [C, C, M] = `steps` * write of
    the tokens that the chunk writes.
    """

    kept: Tensor
    steps: Tensor
    weights: Tensor


def _gates(x: _Inputs, layout: _Layout, resets: Tensor | None) -> _Gates:
    decay, write = layout.written(x.decay), layout.written(x.write)
    if resets is not None:
        decay, write = decay.masked_fill(resets, 0), write.masked_fill(resets, 0)
    total = decay.cumsum(3)
    n = layout.chunk
    later = torch.ones(n, n, dtype=torch.bool, device=total.device).triu(1)[..., None]
    kept = total.exp()
    if resets is not None:
        runs = resets.cumsum(3)
        later = later | (runs[:, :, :, :, None] != runs[:, :, :, None])
        kept = kept.masked_fill(runs > 0, 0)
    # Masked before the exponential: differences of later steps are positive and may overflow.
    gaps = (total[:, :, :, :, None] - total[:, :, :, None]).masked_fill(later, -math.inf)
    steps = gaps.exp()
    return _Gates(kept, steps, steps * write[:, :, :, None])


def _scan(kept: Tensor, added: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states before each of N updates, state = kept * state + added, [B, K, N, M, E], and the last.

    Doubles the number of joined updates in each round, so that rounds and not updates are what is launched.
    """
    shift, n = 1, kept.shape[2]
    while shift < n:
        later = slice(shift, None)
        joined = kept[:, :, later] * added[:, :, :-shift] + added[:, :, later]
        added = torch.cat((added[:, :, :shift], joined), dim=2)
        kept = torch.cat((kept[:, :, :shift], kept[:, :, later] * kept[:, :, :-shift]), dim=2)
        shift *= 2
    after = kept * start[:, :, None] + added
    return torch.cat((start[:, :, None], after[:, :, :-1]), dim=2), after[:, :, -1]


def _states(
    x: _Inputs, layout: _Layout, gates: _Gates, state: MemoryState
) -> tuple[MemoryState, MemoryState]:
    """Return the states before each chunk, [B, K, N, M, ...], and the one after all."""
    last = gates.weights[:, :, :, -1]
    tokens = (layout.written(x.slot_k), layout.written(x.v))
    added = [torch.einsum("bknim,bknid->bknmd", last, y) for y in tokens]
    start = torch.cat((state.keys, state.values, state.mass[..., None]), dim=-1)
    each = torch.cat((*added, last.sum(3)[..., None]), dim=-1)
    before, after = _scan(gates.kept[:, :, :, -1, :, None], each, start)

    def split(y: Tensor) -> MemoryState:
        keys, values, mass = y.split((x.k.shape[-1], x.v.shape[-1], 1), dim=-1)
        return MemoryState(keys, values, mass[..., 0])

    return split(before), split(after)


class _Read(NamedTuple):
    """What queries read: probabilities of window, by block, and of slots, by chunk; and the slots' two scores."""

    window: Tensor
    slots: Tensor
    of_state: Tensor
    products: Tensor


def _read(x: _Inputs, layout: _Layout, gates: _Gates, states: MemoryState, first: Tensor | None) -> _Read:
    slot_q = layout.blocks(x.slot_q, layout.chunk)
    scores = torch.einsum("bkgncd,bknsd->bkgncs", layout.blocks(x.q, layout.block), layout.windows(x.k))
    scores = scores.masked_fill(layout.hidden(first, x.q.device), -math.inf).flatten(3, 4)
    of_state = torch.einsum("bkgncd,bknmd->bkgncm", slot_q, states.keys)
    products = torch.einsum("bkgncd,bknid->bkgnci", slot_q, layout.written(x.slot_k))
    slots = gates.kept[:, :, None] * of_state + torch.einsum("bkgnci,bkncim->bkgncm", products, gates.weights)
    mass = gates.kept * states.mass[:, :, :, None] + gates.weights.sum(4)
    slots = slots.masked_fill((mass <= 0)[:, :, None], -math.inf).flatten(3, 4)
    # A query of window 0 before the first write sees nothing; it reads zeros.
    p = torch.cat((scores, slots), dim=-1).softmax(-1).nan_to_num(nan=0.0)
    window, slots = p.split((scores.shape[-1], slots.shape[-1]), dim=-1)
    sizes = (-1, layout.block), (-1, layout.chunk)
    return _Read(window.unflatten(3, sizes[0]), slots.unflatten(3, sizes[1]), of_state, products)


class _Pass(NamedTuple):
    """All of a forward but its output: states before each chunk and after all, and what queries read."""

    layout: _Layout
    resets: Tensor | None
    gates: _Gates
    states: MemoryState
    after: MemoryState
    read: _Read

    @classmethod
    def of(cls, x: _Inputs, state: MemoryState, first: Tensor | None, window: int, chunk: int) -> _Pass:
        layout = _Layout(x, window, chunk)
        resets = layout.resets(first)
        gates = _gates(x, layout, resets)
        states, after = _states(x, layout, gates, state)
        return cls(layout, resets, gates, states, after, _read(x, layout, gates, states, first))


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
    """Compute the op in plain PyTorch, all chunks at once."""
    x = _Inputs.of(q, k, v, slot_q, slot_k, decay, write)
    state, _ = _start(x, MemoryState(keys, values, mass), window)
    layout, _, gates, states, after, p = _Pass.of(x, state, first, window, chunk)
    by_token = torch.einsum("bkgncm,bkncim->bkgnci", p.slots, gates.weights)
    of_slots = torch.einsum("bkgncm,bknmd->bkgncd", p.slots * gates.kept[:, :, None], states.values)
    of_slots += torch.einsum("bkgnci,bknid->bkgncd", by_token, layout.written(x.v))
    of_window = torch.einsum("bkgncs,bknsd->bkgncd", p.window, layout.windows(x.v))
    out = (of_window.flatten(3, 4) + of_slots.flatten(3, 4))[:, :, :, : q.shape[2]].flatten(1, 2)
    # An op returns no input and no view of one tensor twice.
    keys, values, mass = (y.clone(memory_format=torch.contiguous_format) for y in after)
    return out.to(q.dtype).contiguous(), keys, values, mass


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
    """Compute the gradients of all inputs but `mass`, from states and probabilities that are computed again."""
    given = (q, k, v, slot_q, slot_k, decay, write, keys, values)
    x = _Inputs.of(*given[:7])
    state, n_before = _start(x, MemoryState(keys, values, mass), window)
    grads = _Inputs(*(torch.zeros_like(y) for y in x))
    after = _read_backward(
        x, grads, upcast(grad), (grad_keys, grad_values), state, first, window, chunk, bptt_chunks
    )
    after = _write_backward(x, grads, after, MemoryState(keys, values, mass), n_before)
    found = (grads.q.flatten(1, 2), grads.k, grads.v, grads.slot_q.flatten(1, 2), *grads[4:], *after)
    a, b, c, d, e, f, g, h, i = (y.to(x.dtype).contiguous() for y, x in zip(found, given, strict=True))
    return a, b, c, d, e, f, g, h, i


def _read_backward(
    x: _Inputs,
    grads: _Inputs,
    grad: Tensor,
    grad_after: tuple[Tensor, Tensor],
    state: MemoryState,
    first: Tensor | None,
    window: int,
    chunk: int,
    bptt_chunks: int,
) -> tuple[Tensor, Tensor]:
    """Add the gradients of what queries read and write to `grads`; return those of the state before them."""
    layout, resets, gates, states, _, p = _Pass.of(x, state, first, window, chunk)
    weights, kept, slot_q = gates.weights, gates.kept[:, :, None], layout.blocks(x.slot_q, chunk)
    slot_k, v = layout.written(x.slot_k), layout.written(x.v)
    grad = grad.unflatten(1, (x.k.shape[1], -1))
    by_block, by_chunk = layout.blocks(grad, layout.block), layout.blocks(grad, chunk)
    # Gradients of the scores: through the softmax, from what each probability multiplies.
    through_window = torch.einsum("bkgncd,bknsd->bkgncs", by_block, layout.windows(x.v))
    of_values = torch.einsum("bkgncd,bknmd->bkgncm", by_chunk, states.values)
    v_products = torch.einsum("bkgncd,bknid->bkgnci", by_chunk, v)
    through_slots = kept * of_values + torch.einsum("bkgnci,bkncim->bkgncm", v_products, weights)
    total = (p.window * through_window).sum(-1).flatten(3, 4) + (p.slots * through_slots).sum(-1).flatten(
        3, 4
    )
    by_window = p.window * (through_window - total.unflatten(3, (-1, layout.block))[..., None])
    by_slot = p.slots * (through_slots - total.unflatten(3, (-1, chunk))[..., None])
    # The window.
    grads.q.add_(_queries(torch.einsum("bkgncs,bknsd->bkgncd", by_window, layout.windows(x.k)), grads.q))
    q = layout.blocks(x.q, layout.block)
    layout.add_windows(grads.k, torch.einsum("bkgncs,bkgncd->bknsd", by_window, q))
    layout.add_windows(grads.v, torch.einsum("bkgncs,bkgncd->bknsd", p.window, by_block))
    # The slots: their state before the chunk, and what the chunk writes.
    by_token = torch.einsum("bkgncm,bkncim->bkgnci", by_slot, weights)
    of_state = torch.einsum("bkgncm,bknmd->bkgncd", by_slot * kept, states.keys)
    of_tokens = torch.einsum("bkgnci,bknid->bkgncd", by_token, slot_k)
    grads.slot_q.add_(_queries(of_state + of_tokens, grads.slot_q))
    read = torch.cat(
        (
            torch.einsum("bkgncm,bkgncd->bknmd", by_slot * kept, slot_q),
            torch.einsum("bkgncm,bkgncd->bknmd", p.slots * kept, by_chunk),
        ),
        dim=-1,
    )
    passes = torch.ones(read.shape[2], dtype=read.dtype, device=read.device)
    if bptt_chunks:
        passes[bptt_chunks::bptt_chunks] = 0
    passes, last_kept = passes[:, None, None], gates.kept[:, :, :, -1, :, None]
    start = torch.cat([upcast(y) for y in grad_after], dim=-1)
    after, before = _scan((passes * last_kept).flip(2), (passes * read).flip(2), start)
    widths = (x.k.shape[-1], x.v.shape[-1])
    after_k, after_v = after.flip(2).split(widths, dim=-1)
    last = weights[:, :, :, -1]
    grad_k = torch.einsum("bkgnci,bkgncd->bknid", by_token, slot_q)
    grad_k += torch.einsum("bknim,bknmd->bknid", last, after_k)
    p_token = torch.einsum("bkgncm,bkncim->bkgnci", p.slots, weights)
    grad_v = torch.einsum("bkgnci,bkgncd->bknid", p_token, by_chunk)
    grad_v += torch.einsum("bknim,bknmd->bknid", last, after_v)
    # The gates.
    grad_weights = torch.einsum("bkgncm,bkgnci->bkncim", by_slot, p.products)
    grad_weights += torch.einsum("bkgncm,bkgnci->bkncim", p.slots, v_products)
    grad_weights[:, :, :, -1] += torch.einsum("bknid,bknmd->bknim", slot_k, after_k)
    grad_weights[:, :, :, -1] += torch.einsum("bknid,bknmd->bknim", v, after_v)
    grad_kept = (by_slot * p.of_state + p.slots * of_values).sum(2)
    grad_kept[:, :, :, -1] += (states.keys * after_k).sum(-1) + (states.values * after_v).sum(-1)
    by_gap = grad_weights * weights
    grad_total = by_gap.sum(4) - by_gap.sum(3) + grad_kept * gates.kept
    grad_decay = grad_total.flip(3).cumsum(3).flip(3)
    grad_write = (grad_weights * gates.steps).sum(3)
    if resets is not None:
        grad_decay, grad_write = grad_decay.masked_fill(resets, 0), grad_write.masked_fill(resets, 0)
    layout.add_written(grads.slot_k, grad_k)
    layout.add_written(grads.v, grad_v)
    layout.add_written(grads.decay, grad_decay)
    layout.add_written(grads.write, grad_write)
    found_k, found_v = before.split(widths, dim=-1)
    return found_k, found_v


def _queries(found: Tensor, like: Tensor) -> Tensor:
    """Return [B, K, G, N, C, E] without its padding. Shape: [B, K, G, T, E]."""
    return found.flatten(3, 4)[:, :, :, : like.shape[3]]


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
