"""What the launcher of `store_tokens` hands to a kernel that is compiled already, and which calls reach it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops import backend
from caramba.ops.dba_append import check_store_tokens
from caramba.ops.dba_append import store_tokens as store_tokens_op
from tests.ops.test_store_tokens import CASES, arguments

pytest.importorskip("triton")

from caramba.kernels.triton import launch, store_tokens

from tests.ops.test_decode_launches import STREAM, Kernel

# Which stream and which buffer each of the three has, in the kernel's order; the first where there are fewer.
ORDER = {
    "grouped": ((0, 1, 0), (0, 1, 0)),
    "decoupled": ((0, 1, 2), (0, 1, 2)),
    "heads of their own": ((0, 1, 0), (0, 1, 0)),
    "latent, side by side": ((0, 1, 0), (0, 0, 0)),
    "two together and one": ((0, 1, 2), (0, 0, 1)),
    "one": ((0, 0, 0), (0, 0, 0)),
    "more than a program's": ((0, 1, 0), (0, 1, 0)),
    "no features": ((0, 2, 0), (0, 0, 0)),
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    found = Kernel(store_tokens._store_tokens)
    monkeypatch.setattr(store_tokens, "_store_tokens", found)
    monkeypatch.setattr(store_tokens, "_plans", store_tokens.LaunchCache())
    return found


def given(name: str, where: str = "inside") -> list[Any]:
    """Arguments of tensors that begin where the kernel's own of one form begin: at multiples of 16 bytes."""
    return arguments(name, where, torch.float16, torch.float16, heads_first=True)


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_kernel_gets_the_places_of_the_tensors_that_triton_got(name: str, kernel: Kernel) -> None:
    for _ in range(2):
        streams, buffers, *ids = given(name)
        store_tokens.store_tokens(streams, buffers, *ids, admit=check_store_tokens)
    (first,), (call,) = kernel.given, kernel.compiled.calls
    of_streams, of_buffers = ORDER[name]
    wanted = [*(streams[i] for i in of_streams), *(buffers[i] for i in of_buffers), *ids]
    assert [x.shape for x in first[:8]] == [x.shape for x in wanted]
    assert list(call[9:17]) == [x.data_ptr() for x in wanted]
    assert call[17 : 17 + len(first) - 8] == first[8:], "scalars"


def test_heads_that_fill_no_program_are_for_one(kernel: Kernel) -> None:
    for name, grid in (("grouped", (5, 1, 1)), ("more than a program's", (5, 3, 1))):
        for _ in range(2):
            store_tokens.store_tokens(*given(name))
        assert kernel.compiled.calls[-1][:3] == grid


def test_a_store_is_refused_whatever_was_taken_before(kernel: Kernel) -> None:
    streams, buffers, rows, places = given("decoupled")
    store_tokens.store_tokens(streams, buffers, rows, places, admit=check_store_tokens)
    wrong: list[tuple[list[Tensor], list[Tensor], Tensor, Tensor]] = [
        (streams, buffers, rows.int(), places),
        (streams, buffers, rows, places[1:]),
        (streams, buffers[:2], rows, places),
        (streams, [*buffers[:2], buffers[2][:, :1]], rows, places),
        # The same tensors in the same order, of which one is no stream.
        ([*streams, buffers[0]], buffers[1:], rows, places),
    ]
    for refused in wrong:
        for _ in range(2):
            with pytest.raises(ConfigError, match="store_tokens: "):
                store_tokens.store_tokens(*refused, admit=check_store_tokens)
    assert (len(kernel.given), kernel.compiled.calls) == (1, [])


def test_nothing_to_store_launches_nothing(kernel: Kernel) -> None:
    streams, buffers, rows, places = given("grouped")
    for empty in (
        given("grouped", "none"),
        (streams, [x[:0] for x in buffers], rows, places),
        (streams, [x[:, :, :0] for x in buffers], rows, places),
    ):
        for _ in range(2):
            store_tokens.store_tokens(*empty, admit=check_store_tokens)
    assert kernel.given == []


def test_a_store_without_gradients_runs_the_launcher_and_counts_as_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def launched(*args: Any, admit: Any) -> None:
        admit(*args)
        calls.append(args)

    monkeypatch.setitem(backend.launchers, ("store_tokens", "cpu"), launched)
    streams, buffers, *ids = given("decoupled")
    streams, buffers, ids = ([x.cpu() for x in group] for group in (streams, buffers, ids))
    rows, places = ids
    with torch.no_grad():
        store_tokens_op(streams, buffers, rows, places)
        assert len(calls) == 1
        assert {x._version for x in buffers} == {1}, "a backward that kept them is refused"
        for wrong in (([], buffers), (streams, []), (streams, buffers[:2])):
            with pytest.raises(ConfigError, match="store_tokens: "):
                store_tokens_op(*wrong, rows, places)
    with torch.inference_mode():
        store_tokens_op(streams, [x.clone() for x in buffers], rows, places)
    assert len(calls) == 2
    store_tokens_op(streams, buffers, rows, places)
    assert len(calls) == 2, "where gradients are taken it is the op that writes"
    assert all(x._version > 1 for x in buffers)
