"""The op at window 0 against the naive form of gated slot attention of flash-linear-attention, if it is installed."""

from __future__ import annotations

import pytest
import torch

from caramba.ops.memory_bank import memory_bank
from tests.unit.ops.test_memory_bank import T, arguments


def test_memory_bank_at_window_0_equals_naive_gated_slot_attention() -> None:
    naive = pytest.importorskip("fla.ops.gsa.naive")
    q, _, v, _, k, decay, write = (x.detach().float() for x in arguments(T, T))
    ours, state = memory_bank(q, k, v, q, k, decay, write, window=0, chunk=4)
    given = (x.transpose(1, 2) for x in (q, k, v, write, decay))
    theirs, (keys, values) = naive.naive_recurrent_gsa(*given, scale=1.0, output_final_state=True)
    torch.testing.assert_close(ours, theirs.transpose(1, 2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.keys, keys.transpose(-1, -2), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.values, values, atol=1e-5, rtol=1e-5)
