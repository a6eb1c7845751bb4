"""The op of a window and memory slots: its contract, and its values against a recurrence token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba import kernels
from caramba.config.memory_bank import LONGEST_CHUNK
from caramba.errors import ConfigError
from caramba.ops.memory_bank import LOWEST, MemoryState, memory_bank, write_slots
from tests.unit.ops.kernel_device import HAS_GPU

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
    given: list[Tensor],
    window: int,
    state: MemoryState | None = None,
    first: Tensor | None = None,
    slot_bias: Tensor | None = None,
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
                far = keys @ slot_q[b, head, t] + (0 if slot_bias is None else slot_bias[kv].detach())
                scores = torch.cat((k[b, kv, low : place + 1] @ q[b, head, t], far[some]))
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


@pytest.mark.parametrize("n_keys", [T, T + 9])
def test_a_bias_of_slots_is_added_to_their_scores_and_has_its_gradient(n_keys: int) -> None:
    bias, state = normal(K, M, seed=10).requires_grad_(), some_state()
    given = arguments(T, n_keys)
    out, _ = memory_bank(*given, window=3, state=state, chunk=4, slot_bias=bias)
    torch.testing.assert_close(out, recurrence(given, 3, state, slot_bias=bias)[0])
    q, k, v, slot_q, *rest = given
    last, _ = memory_bank(q[:, :, -1:], k, v, slot_q[:, :, -1:], *rest, window=3, state=state, slot_bias=bias)
    torch.testing.assert_close(last, out[:, :, -1:])

    def output(*inputs: Tensor) -> Tensor:
        return memory_bank(*inputs[:-1], window=3, chunk=4, slot_bias=inputs[-1])[0]

    assert torch.autograd.gradcheck(output, (*arguments(), bias), fast_mode=True)


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
    assert torch.autograd.gradcheck(outputs, (state.keys, state.values, *arguments(T, n_keys)), fast_mode=True)


def test_write_slots_in_parts_equals_at_once() -> None:
    tokens = [x.detach() for x in (arguments()[i] for i in (4, 2, 5, 6))]
    at_once = write_slots(some_state(), *tokens)
    state = some_state()
    for part in zip(*(x.split((2, 1, 8), dim=2) for x in tokens), strict=True):
        state = write_slots(state, *part)
    for got, want in zip(state, at_once, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("gates", ["open", "closed", "both", "mixed"])
def test_extreme_gates_in_float32_equal_the_recurrence(gates: str, with_documents: bool) -> None:
    """Slots that take every token whole, or none, next to each other and in turn, over several chunks."""
    n, window = 3 * LONGEST_CHUNK + 5, 2
    given = [x.detach() for x in arguments(n, n)]
    is_open = {
        "open": torch.ones(M, dtype=torch.bool),
        "closed": torch.zeros(M, dtype=torch.bool),
        "both": torch.arange(M) % 2 == 0,
        "mixed": normal(B, K, n, M, seed=12) > 0,
    }[gates]
    given[5] = torch.where(is_open, torch.full_like(given[5], LOWEST), torch.full_like(given[5], -1e-7))
    given[6] = -torch.expm1(given[5])
    first = torch.tensor([0] * 40 + [40] * (n - 40)).expand(B, n) if with_documents else None
    narrow = [x.float().requires_grad_() for x in given]
    wide = [x.requires_grad_() for x in given]
    out, state = memory_bank(*narrow, window=window, first=first)
    expected, expected_state = recurrence(wide, window, first=first)
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
    if first is None:
        for got, want in zip(state, expected_state, strict=True):
            torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    exact, _ = memory_bank(*wide, window=window, first=first, chunk=1)
    found, expected_gradients = gradients(out, narrow), gradients(exact, wide)
    for got, want in zip(found, expected_gradients, strict=True):
        assert torch.isfinite(got).all()
        assert (got - want).norm() <= 1e-4 * want.norm()


def test_decays_below_the_lowest_count_as_the_lowest() -> None:
    given, state = [x.detach() for x in arguments()], some_state()
    low = [*given[:5], torch.full_like(given[5], -1e4), given[6]]
    bound = [*given[:5], torch.full_like(given[5], LOWEST), given[6]]
    for chunk in (1, 4):
        one, other = (memory_bank(*x, window=2, state=state, chunk=chunk) for x in (low, bound))
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
    one, other = (write_slots(state, x[4], x[2], *x[5:]) for x in (low, bound))
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


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
    """Windows of several blocks, groups of several chunks in two levels, ends that fill none."""
    n, seen = 275, []
    for chunk in (1, 4, 32):
        given = arguments(n, n + 9)
        out, after = memory_bank(*given, window=30, state=some_state(), chunk=chunk)
        weights = normal(*out.shape, seed=11)
        found = torch.autograd.grad((out * weights).sum() + after.keys.sum() + after.values.sum(), given)
        seen.append([out, *after, *found])
    for one, *others in zip(*seen, strict=True):
        for many in others:
            torch.testing.assert_close(many, one)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="flash attention needs a CUDA device")
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_bfloat16_on_a_gpu_agrees_with_float64(is_mixed: bool, with_documents: bool) -> None:
    kernels.load("cuda")
    n, shape = 300, (2, 2, 300)
    given = [normal(2, 4 if place in (0, 3) else 2, n, 32, seed=place) / 6 for place in range(5)]
    decay = -normal(*shape, 16, seed=5).square().clamp_max(4)
    given = [x.bfloat16() for x in given] + [decay.float(), -torch.expm1(decay).float()]
    first = torch.tensor([[0] * 90 + [90] * 210, [0] * 300]) if with_documents else None
    share = torch.linspace(0.1, 0.9, 4) if is_mixed else None
    found = []
    for device, kind in (("cuda", None), ("cpu", torch.float64)):
        moved = [x.to(device, kind).requires_grad_() for x in given]
        extra = {"first": first, "share": share}
        options = {name: None if x is None else x.to(device) for name, x in extra.items()}
        out, _ = memory_bank(*moved, window=64, **options)
        weight = normal(*out.shape, seed=11).to(out)
        found.append((out, *torch.autograd.grad((out * weight).sum(), moved)))
    for got, want in zip(*found, strict=True):
        assert (got.cpu().double() - want).norm() < 2e-2 * want.norm()
