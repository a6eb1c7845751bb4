"""Gated reads and write gates of memory slots, against formulas written out token by token in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.unit.layer.test_memory_bank import layer_config, memory_model, tokens
from tests.unit.ops.test_memory_bank import FIRST, K, M, T, arguments, normal, some_state
from torch import Tensor

from caramba.layer import MemoryBankLayer
from caramba.layer.write_rate import WEIGHT, hold_rate
from caramba.ops.memory_bank import MemoryState, memory_bank, write_slots

WINDOW = 3
SHARE = torch.tensor([0.1, 0.4, 0.7, 0.9], dtype=torch.float64)


def written_out(given: list[Tensor], state: MemoryState | None, first: Tensor | None) -> Tensor:
    """Return the read of each head and query by itself: two softmaxes, then the mix."""
    q, k, v, slot_q, slot_k, decay, write = given
    before = k.shape[2] - q.shape[2]
    rows = []
    for b in range(q.shape[0]):
        for head in range(q.shape[1]):
            kv = head * K // q.shape[1]
            for t in range(q.shape[2]):
                place = before + t
                begin = 0 if first is None else int(first[b, t])
                low = max(place - WINDOW + 1, begin)
                near = (k[b, kv, low : place + 1] @ q[b, head, t]).softmax(0) @ v[b, kv, low : place + 1]
                left = slice(begin, max(place - WINDOW + 1, begin))
                slots = (
                    MemoryState.empty(slot_k[b : b + 1], v[b : b + 1], M)
                    if state is None
                    else MemoryState(*(x[b : b + 1] for x in state))
                )
                if left.stop > left.start:
                    slots = write_slots(slots, *(x[b : b + 1, :, left] for x in (slot_k, v, decay, write)))
                is_empty = not bool((slots.mass[0, kv] > 0).any())
                far = (slots.keys[0, kv] @ slot_q[b, head, t]).softmax(0) @ slots.values[0, kv]
                rows.append(near if is_empty else (1 - SHARE[head]) * near + SHARE[head] * far)
    return torch.stack(rows).view(*q.shape[:3], -1)


@pytest.mark.parametrize("chunk", [1, 4, 32])
@pytest.mark.parametrize(
    ("n_keys", "has_state", "first"),
    [(T, False, None), (T, True, None), (T + 5, True, None), (T, False, FIRST)],
)
def test_gated_read_and_its_gradients_equal_the_formula(
    n_keys: int, has_state: bool, first: Tensor | None, chunk: int
) -> None:
    given, state = arguments(T, n_keys), some_state() if has_state else None
    found, _ = memory_bank(*given, window=WINDOW, share=SHARE, state=state, first=first, chunk=chunk)
    expected = written_out(given, state, first)
    torch.testing.assert_close(found, expected)
    weight = normal(*found.shape, seed=12)
    ours, theirs = (torch.autograd.grad((out * weight).sum(), given) for out in (found, expected))
    for got, want in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, want)


def test_write_gate_scales_what_slots_take_and_keeps_the_rest() -> None:
    layer = MemoryBankLayer(layer_config(use_adaptive_compression=True, memory_write_rate=0.3)).double()
    layer.reset_parameters()
    with torch.no_grad():
        layer.write_gate.copy_(normal(*layer.write_gate.shape, seed=1))
    plain = MemoryBankLayer(layer_config()).double()
    plain.load_state_dict({name: x for name, x in layer.state_dict().items() if "write_gate" not in name})
    k, v = normal(1, 2, 9, 6, seed=2), normal(1, 2, 9, 6, seed=3)
    places = torch.arange(k.shape[2])
    decay, write = layer.gates(k, v, places)
    _, all_of_it = plain.gates(k, v, places)
    for head in range(2):
        for token in range(9):
            both = torch.cat((k[0, head, token], v[0, head, token]))
            both = both / both.square().mean().sqrt()
            taken = torch.sigmoid(layer.write_gate[head] @ both + layer.write_gate_bias[head])
            expected = taken * all_of_it[0, head, token]
            torch.testing.assert_close(write[0, head, token], expected)
            torch.testing.assert_close(decay[0, head, token].exp(), 1 - expected)


def test_a_new_write_gate_takes_the_target_of_every_token() -> None:
    layer = MemoryBankLayer(layer_config(use_adaptive_compression=True, memory_write_rate=0.3)).double()
    layer.reset_parameters()
    torch.testing.assert_close(layer.write_gate_bias.sigmoid(), torch.full((2,), 0.3, dtype=torch.float64))


def test_held_rate_adds_the_gradient_of_its_penalty_alone() -> None:
    x = normal(3, 4, seed=4).requires_grad_()
    held = hold_rate(x.sigmoid(), 0.2)
    assert torch.equal(held, x.sigmoid())
    (found,) = torch.autograd.grad((held * 2).sum(), x)
    gates = x.sigmoid()
    (expected,) = torch.autograd.grad((gates * 2).sum() + WEIGHT * (gates.mean() - 0.2) ** 2, x)
    torch.testing.assert_close(found, expected)


def test_training_draws_the_write_rate_to_its_target() -> None:
    model = memory_model(use_adaptive_compression=True, memory_write_rate=0.1).train()
    gates = [parameter for name, parameter in model.named_parameters() if "write_gate_bias" in name]
    with torch.no_grad():
        for gate in gates:
            gate.fill_(2.0)
    optimizer = torch.optim.SGD(gates, lr=2.0)
    for _ in range(40):
        optimizer.zero_grad()
        (model(tokens()) * 0.0).sum().backward()  # the penalty alone
        optimizer.step()
    assert all(bool((gate.sigmoid() < 0.3).all()) for gate in gates)


@pytest.mark.parametrize("read", ["joint", "gated"])
def test_read_mass_of_gated_slots_is_the_share_of_their_heads(read: str) -> None:
    model = memory_model(memory_read=read)
    stats = model.get_memory_stats(tokens())
    if read == "gated":
        # A new share is one half; queries within the first window of 7 read no slot.
        assert stats["memory_mass"] == pytest.approx(0.5 * (90 - 7) / 90, abs=1e-5)
    assert 0 < stats["memory_mass"] < 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_write_rate": 0.5}, "is of use_adaptive_compression, which is false"),
        ({"use_adaptive_compression": True, "memory_write_rate": 1.0}, "less than 1"),
        ({"memory_read": "mean"}, "'joint' or 'gated'"),
        ({"memory_bptt_chunks": 0}, "greater than"),
    ],
)
def test_contradicting_gates_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        layer_config(**changes)
