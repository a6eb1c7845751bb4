"""Metal kernels against float64 in the emulator: random shapes, dtypes, strides and orders of threads."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from tests.examples import examples
from tests.ops.decode_cases import Case
from tests.ops.emulated import needs_compiler
from tests.ops.metal_bytes import moved, one_billion
from tests.ops.metal_cases import (
    DTYPES,
    OPS,
    Call,
    calls,
    decode_call,
    errors_of,
    kernel_of,
    launcher,
    surviving,
)
from tests.ops.metal_emulator.library import SANITIZED, emulated_metal
from tests.ops.metal_mutants import MUTANTS

pytestmark = needs_compiler
SAMPLES = int(os.environ.get("CARAMBA_METAL_SAMPLES", "12"))
"""Calls of each op and dtype; 500 passed once (docs/benchmarks/metal_emulated.json)."""
SANITIZERS = SANITIZED if "CARAMBA_METAL_SANITIZED" in os.environ else ()
"""Of the compiler, whose libraries the process has to load first: see docs/apple_silicon.md."""


@pytest.mark.parametrize("op", OPS)
def test_random_shapes_equal_float64(op: str) -> None:
    run = launcher(op)
    samples = [(name, i, call) for name in DTYPES for i, call in enumerate(calls(op, name, SAMPLES))]
    with emulated_metal(options=SANITIZERS) as emulator:
        emulator.prepare(lambda: [call.run(run) for _, _, call in samples])
        for name, i, call in samples:
            emulator.seed = i
            found = errors_of(call, call.run(run))
            assert found.are_small, f"{op} {name}, sample {i}: {found}"
        assert set(emulator.launches) >= {kernel_of(op)}


@pytest.mark.parametrize("kernel", MUTANTS)
def test_every_mistake_is_seen(kernel: str) -> None:
    assert len(MUTANTS[kernel]) >= 8
    with emulated_metal() as emulator:
        assert surviving(kernel, emulator) == []


@pytest.mark.parametrize("op", OPS)
def test_orders_of_threads_change_no_bit(op: str) -> None:
    run = launcher(op)
    chosen, n_tails = list(calls(op, "fp32", 3, seed=1)), 0
    with emulated_metal() as emulator:
        emulator.prepare(lambda: [call.run(run) for call in chosen])
        for call in chosen:
            results = []
            for emulator.seed in range(examples(20)):
                results.append(call.run(run))
            if op == "dba_decode":  # what no sequence has stored yet is NaN in all others
                n_tails += any(x.isnan().any() for stream in call.args[3:6] for x in stream)
                results += [with_tail(call, value).run(run) for value in (0.0, float("inf"))]
            for other in results[1:]:
                for x, like in zip(other, results[0], strict=True):
                    torch.testing.assert_close(x, like, rtol=0, atol=0, equal_nan=True)
    assert n_tails or op != "dba_decode"


def with_tail(call: Call, value: float) -> Call:
    """Return a call of decode attention with another number in the unused tail of its caches."""
    streams = [[x.nan_to_num(nan=value) for x in stream] for stream in call.args[3:6]]
    return replace(call, args=(*call.args[:3], *streams, *call.args[6:]))


def test_kernels_move_little_more_than_they_have_to() -> None:
    """The shapes of the 1B presets with fewer tokens; docs/benchmarks/metal_emulated.json has those of a whole context."""
    one_head = Case(("bf16",) * 3, (1024,), (4, 1), (32, 32, 64), capacity=1024)
    split = Call("dba_decode", torch.bfloat16, decode_call(one_head, torch.bfloat16, 0))
    with emulated_metal() as emulator:
        for name, call in (*one_billion(tokens=64, batch=4, width=128), ("dba_decode, split", split)):
            found, least = moved(call, emulator)
            assert least <= found <= 1.05 * least, f"{name}: {found} bytes moved, at least {least}"
        assert emulator.launches == ["dba_decode", "dba_decode_merge"]
