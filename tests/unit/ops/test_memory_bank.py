"""The op of a window and memory slots: its contract, and its values against a recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.memory_bank import MemoryState, memory_bank, write_slots

B, H, K, T, M, D, DV = 2, 4, 2, 11, 3, 4, 5
FIRST = torch.tensor([[0] * 4 + [4] * 7, [0] * 8 + [8, 9, 9]])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def arguments(n_queries: int = T, n_keys: int = T) -> list[Tensor]:
    given = [
        normal(B, H, n_queries, D, seed=0),
        normal(B, K, n_keys, D, seed=1),
        normal(B, K, n_keys, DV, seed=2),
        normal(B, H, n_queries, D, seed=3),
        normal(B, K, n_keys, D, seed=4),
        -normal(B, K, n_keys, M, seed=5).abs(),
        normal(B, K, n_keys, M, seed=6).abs(),
    ]
    return [x.requires_grad_() for x in given]


def some_state() -> MemoryState:
    return MemoryState(
        normal(B, K, M, D, seed=7).requires_grad_(),
        normal(B, K, M, DV, seed=8).requires_grad_(),
        normal(B, K, M, seed=9).abs(),
    )


def recurrence(
    given: list[Tensor], window: int, state: MemoryState | None = None, first: Tensor | None = None
) -> tuple[Tensor, MemoryState]:
    """Write and read one token at a time, one sequence and head at a time."""
    q, k, v, slot_q, slot_k, decay, write = (x.detach() for x in given)
    before, groups = k.shape[2] - q.shape[2], H // K
    out = torch.zeros(B, H, q.shape[2], DV, dtype=q.dtype)
    start = MemoryState.empty(slot_k, v, M) if state is None else MemoryState(*(x.detach() for x in state))
    after = MemoryState(*(x.clone() for x in start))
    for b in range(B):
        for head in range(H):
            kv = head // groups
            keys, values, mass = (x[b, kv].clone() for x in start)
            written = 0
            for t in range(q.shape[2]):
                place = before + t
                begin = 0 if first is None else int(first[b, t])
                if first is not None and begin == t:
                    keys, values, mass = (torch.zeros_like(x) for x in (keys, values, mass))
                    written = begin
                while written <= place - window:
                    kept, strength = decay[b, kv, written].exp(), write[b, kv, written]
                    keys = kept[:, None] * keys + strength[:, None] * slot_k[b, kv, written]
                    values = kept[:, None] * values + strength[:, None] * v[b, kv, written]
                    mass = kept * mass + strength
                    written += 1
                low = max(place - window + 1, begin)
                some = mass > 0
                scores = torch.cat(
                    (k[b, kv, low : place + 1] @ q[b, head, t], keys[some] @ slot_q[b, head, t])
                )
                seen = torch.cat((v[b, kv, low : place + 1], values[some]))
                out[b, head, t] = scores.softmax(0) @ seen
            for into, x in zip(after, (keys, values, mass), strict=True):
                into[b, kv] = x
    return out, after


@pytest.mark.parametrize("chunk", [1, 3, 4, 32])
@pytest.mark.parametrize("window", [0, 1, 4, 20])
def test_memory_bank_equals_recurrence(window: int, chunk: int) -> None:
    given = arguments()
    out, state = memory_bank(*given, window=window, chunk=chunk)
    expected, expected_state = recurrence(given, window)
    torch.testing.assert_close(out, expected)
    for got, want in zip(state, expected_state, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("chunk", [1, 3, 32])
@pytest.mark.parametrize("n_keys", [T, T + 2, T + 9])
def test_memory_bank_with_state_equals_recurrence(n_keys: int, chunk: int) -> None:
    given, state = arguments(T, n_keys), some_state()
    out, after = memory_bank(*given, window=4, state=state, chunk=chunk)
    expected, expected_state = recurrence(given, 4, state)
    torch.testing.assert_close(out, expected)
    for got, want in zip(after, expected_state, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("chunk", [1, 3, 4, 32])
@pytest.mark.parametrize("window", [1, 3])
def test_memory_bank_with_documents_equals_recurrence(window: int, chunk: int) -> None:
    given = arguments()
    out, _ = memory_bank(*given, window=window, chunk=chunk, first=FIRST)
    torch.testing.assert_close(out, recurrence(given, window, first=FIRST)[0])


def test_memory_bank_window_0_equals_gated_slot_attention() -> None:
    given = arguments()
    q, _, v, _, k, decay, write = (x.detach() for x in given)
    keys, values, out = torch.zeros(B, K, M, D), torch.zeros(B, K, M, DV), []
    for t in range(T):
        kept = decay[:, :, t].exp()[..., None]
        keys = kept * keys + write[:, :, t, :, None] * k[:, :, t, None]
        values = kept * values + write[:, :, t, :, None] * v[:, :, t, None]
        p = torch.einsum("bkgd,bkmd->bkgm", q[:, :, t].unflatten(1, (K, -1)), keys.double()).softmax(-1)
        out.append(torch.einsum("bkgm,bkmd->bkgd", p, values.double()).flatten(1, 2))
    read, _ = memory_bank(q, k, v, q, k, decay, write, window=0, chunk=4)
    torch.testing.assert_close(read, torch.stack(out, dim=2))


@pytest.mark.parametrize("first", [None, FIRST])
def test_memory_bank_meets_op_contract(first: Tensor | None) -> None:
    given = [x.detach().clone().requires_grad_() for x in arguments()]
    state = MemoryState.empty(given[4], given[2], M)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(
        torch.ops.caramba.memory_bank.default, (*given, *state, first, 3, 4, 2), test_utils=tests
    )
    plain = [x.detach() for x in given]
    grads = (normal(B, H, T, DV, seed=10), state.keys.clone(), state.values.clone())
    torch.library.opcheck(
        torch.ops.caramba.memory_bank_backward.default,
        (*grads, *plain, *state, first, 3, 4, 2),
        test_utils=tests[::2],
    )


@pytest.mark.parametrize("first", [None, FIRST])
@pytest.mark.parametrize("chunk", [3, 32])
def test_memory_bank_gradients(chunk: int, first: Tensor | None) -> None:
    def outputs(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, state = memory_bank(*inputs, window=3, chunk=chunk, first=first)
        return out, state.keys, state.values

    assert torch.autograd.gradcheck(outputs, tuple(arguments()), fast_mode=True)


@pytest.mark.parametrize("n_keys", [T, T + 6])
def test_memory_bank_gradients_with_state(n_keys: int) -> None:
    mass = some_state().mass

    def outputs(keys: Tensor, values: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out, state = memory_bank(*inputs, window=3, chunk=4, state=MemoryState(keys, values, mass))
        return out, state.keys, state.values

    state = some_state()
    assert torch.autograd.gradcheck(
        outputs, (state.keys, state.values, *arguments(T, n_keys)), fast_mode=True
    )


def test_write_slots_in_parts_equals_at_once() -> None:
    tokens = [x.detach() for x in (arguments()[i] for i in (4, 2, 5, 6))]
    at_once = write_slots(some_state(), *tokens)
    state = some_state()
    for part in zip(*(x.split((2, 1, 8), dim=2) for x in tokens), strict=True):
        state = write_slots(state, *part)
    for got, want in zip(state, at_once, strict=True):
        torch.testing.assert_close(got, want)


def test_memory_bank_decay_to_zero_stays_finite() -> None:
    given = [x.detach().float() for x in arguments()]
    given[5] = torch.full_like(given[5], -1e4)
    out, _ = memory_bank(*(x.requires_grad_() for x in given), window=2)
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in given if x.grad is not None)


def test_memory_bank_wrong_shapes_are_refused() -> None:
    given = arguments()
    with pytest.raises(ConfigError, match="write is"):
        memory_bank(*[*given[:6], given[6][..., :1]], window=2)
    with pytest.raises(ConfigError, match="state and documents"):
        memory_bank(*given, window=2, state=some_state(), first=FIRST)


def gradients(out: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((out * normal(*out.shape, seed=11)).sum(), given)


@pytest.mark.parametrize("bptt_chunks", [1, 2])
def test_truncated_gradients_are_those_of_segments_with_a_constant_state(bptt_chunks: int) -> None:
    given, window, chunk = arguments(), 3, 2
    found = gradients(memory_bank(*given, window=window, chunk=chunk, bptt_chunks=bptt_chunks)[0], given)
    state, outputs, size = None, [], chunk * bptt_chunks
    for start in range(0, T, size):
        end, low = min(start + size, T), max(start - window, 0)
        queries, keys = slice(start, end), slice(low, end)
        # Tokens before the segment that its queries write are here, with their gradients.
        parts = [x[:, :, queries if place in (0, 3) else keys] for place, x in enumerate(given)]
        out, after = memory_bank(*parts, window=window, state=state, chunk=chunk)
        outputs.append(out)
        state = MemoryState(*(x.detach() for x in after))
    expected = gradients(torch.cat(outputs, 2), given)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)
    full = gradients(memory_bank(*given, window=window, chunk=chunk)[0], given)
    assert not torch.allclose(found[4], full[4])


@pytest.mark.parametrize("bptt_chunks", [0, 6, 50])
def test_gradients_over_all_chunks_are_the_full_ones(bptt_chunks: int) -> None:
    given = arguments()
    found = gradients(memory_bank(*given, window=3, chunk=2, bptt_chunks=bptt_chunks)[0], given)
    expected = gradients(memory_bank(*given, window=3, chunk=32)[0], given)
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want)


def test_blocks_of_chunks_equal_single_steps() -> None:
    """Windows of several blocks, blocks of several chunks, ends that fill neither."""
    n, seen = 75, []
    for chunk in (1, 4):
        given = arguments(n, n + 9)
        out, after = memory_bank(*given, window=30, state=some_state(), chunk=chunk)
        weights = normal(*out.shape, seed=11)
        found = torch.autograd.grad((out * weights).sum() + after.keys.sum() + after.values.sum(), given)
        seen.append([out, *after, *found])
    for one, many in zip(*seen, strict=True):
        torch.testing.assert_close(many, one)
