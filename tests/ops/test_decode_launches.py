"""What the launchers of decode attention and its caches hand to kernels that are compiled already."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops import backend
from caramba.ops.dba_append import check_dba_append
from caramba.ops.dba_append import dba_append as dba_append_op
from caramba.ops.dba_decode import _admit
from tests.ops import test_dba_append as appends
from tests.ops.decode_cases import Case, arguments

pytest.importorskip("triton")  # a Mac has none

from caramba.kernels.triton import dba_append, dba_decode, launch

from tests.unit.kernels.test_launch import Compiled

STREAM = 5


class Kernel:
    """Stands for a kernel: keeps what Triton is given, and then what its compiled kernel is."""

    def __init__(self, kernel: Any) -> None:
        self.arg_names, self.compiled = kernel.arg_names, Compiled()
        self.given: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*args: Any, **constants: Any) -> Compiled:
            self.given.append(args)
            return self.compiled

        return run


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "INTERPRETED", False)
    found = {}
    for module, name in (
        (dba_decode, "split_kv_kernel"),
        (dba_decode, "combine_kernel"),
        (dba_append, "_append"),
    ):
        found[name] = Kernel(getattr(module, name))
        monkeypatch.setattr(module, name, found[name])
    monkeypatch.setattr(dba_decode, "plans", dba_decode.LaunchCache())
    monkeypatch.setattr(dba_append, "_plans", dba_append.LaunchCache())
    return found


def decode(case: Case, n_splits: int) -> tuple[tuple[Any, ...], tuple[Tensor, Tensor]]:
    args, options = arguments(case, torch.float16, "cpu")
    streams = [stream for stream in args[2:5] if stream is not None]
    parts = [stream.tensors for stream in streams] + [[]] * (3 - len(streams))
    null = list(options.get("null", ()))
    given = (*args[:2], [stream.kind for stream in streams], *parts, args[5], options.get("n_packed"), null)
    return given, dba_decode.dba_decode(*given, case.window or 0, 0, n_splits)


CASES = {
    "latent of numbers": Case(("fp16", "fp16"), (70, 1), heads=(4, 1), dims=(32, 16, 32)),
    "mixed": Case(("q4_0", "q8_0", "q4_0"), (105, 0), packed=64, null=True),
}


@pytest.mark.parametrize("n_splits", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_compiled_kernel_gets_the_places_of_the_tensors_that_triton_got(
    name: str, n_splits: int, kernels: dict[str, Kernel]
) -> None:
    split, join = kernels["split_kv_kernel"], kernels["combine_kernel"]
    decode(CASES[name], n_splits)
    (first,) = split.given
    roles = [x for x in first if isinstance(x, Tensor)]
    assert len(roles) == 15
    given, (out, sums) = decode(CASES[name], n_splits)
    assert len(split.given) == 1, "the second call is of the same form"
    (call,) = split.compiled.calls
    addresses = call[9 : 9 + len(roles)]
    assert call[3:9] == (STREAM, "function", "metadata", None, None, None)
    q_sem, q_geo, _, k_sem, k_geo, v, seqlens, n_packed, null = given
    sides = [k_sem, k_geo, v or k_sem]
    wanted = [q_sem, q_geo, *(side[0] for side in sides), *(side[len(side) // 2] for side in sides)]
    wanted += [*(side[-1] for side in sides), seqlens, seqlens if n_packed is None else n_packed]
    assert list(addresses[:13]) == [x.data_ptr() for x in wanted]
    assert call[9 + len(roles) :][: len(first) - len(roles)] == first[len(roles) :], "scalars"
    assert [x.dtype for x in roles[:13]] == [x.dtype for x in wanted]
    ends = (out.data_ptr(), sums.data_ptr())
    assert [x.dtype for x in roles[13:]] == [torch.float16, torch.float32]
    if n_splits == 1 and not null:
        assert addresses[13:] == ends
        assert join.given == []
        return
    parts, part_sums = addresses[13:]
    assert part_sums - parts >= out.numel() * n_splits * 2
    assert (part_sums - parts) % 16 == 0
    (joined,) = join.compiled.calls
    q = [q_sem.data_ptr(), q_geo.data_ptr()]
    nulls = [row.data_ptr() for row in null] or [*q, q[0]]
    assert list(joined[9:18]) == [parts, part_sums, *q, *nulls[:2], nulls[2 if v else 0], *ends]
    assert [x.dtype for x in join.given[0][:2]] == [torch.float16, torch.float32]
    assert join.given[0][0].numel() >= out.numel() * n_splits
    assert join.given[0][1].numel() == sums.numel() * n_splits


def test_decoding_is_refused_whatever_was_taken_before(kernels: dict[str, Kernel]) -> None:
    (q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, n_packed, null), _ = decode(CASES["mixed"], 3)
    rest = (seqlens, n_packed, null, 0, 0, 3)
    wrong = [
        (q_sem, q_geo, ["nf4", *kinds[1:]], k_sem, k_geo, v, *rest),
        # The same tensors in the same order, of other streams.
        (q_sem, q_geo, kinds, k_sem[:2], [k_sem[2], *k_geo], v, *rest),
        (q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens, None, null, 0, 0, 3),
        (q_sem, q_geo, kinds, k_sem, k_geo, v, seqlens.long(), n_packed, null, 0, 0, 3),
        (q_sem, q_geo, kinds, k_sem, k_geo, v, *rest[:3], -1, 0, 3),
    ]
    good = (q_sem, q_geo, kinds, k_sem, k_geo, v, *rest)
    for given in wrong:
        for _ in range(2):
            dba_decode.dba_decode(*good, admit=_admit)
            with pytest.raises(ConfigError, match="dba_decode: "):
                dba_decode.dba_decode(*given, admit=_admit)
    assert len(kernels["split_kv_kernel"].given) == 1


def test_queries_askew_get_a_kernel_of_their_own(kernels: dict[str, Kernel]) -> None:
    split = kernels["split_kv_kernel"]
    args, _ = arguments(CASES["latent of numbers"], torch.float16, "cpu")
    streams = [args[2].tensors, args[3].tensors, []]

    def call(q: Tensor) -> None:
        dba_decode.dba_decode(q, args[1], ["fp16", "fp16"], *streams, args[5], None, [], 0, 0, 3)

    room = torch.zeros(args[0].numel() + 1, dtype=torch.float16)
    even, odd = (room[i : i + args[0].numel()].view(args[0].shape) for i in (0, 1))
    call(even)
    call(odd)
    assert (len(split.given), split.compiled.calls) == (2, [])
    call(odd)
    call(even)
    assert len(split.given) == 2
    assert [args[9] for args in split.compiled.calls] == [odd.data_ptr(), even.data_ptr()]


@pytest.mark.parametrize("name", appends.CASES)
def test_an_append_gets_the_places_of_the_tensors_that_triton_got(name: str, kernels: dict[str, Kernel]) -> None:
    append = kernels["_append"]
    for _ in range(2):
        given = appends.arguments(name, [3, 6], 2, torch.float16, torch.float16)
        dba_append.dba_append(*given, admit=check_dba_append)
    (first,), (call,) = append.given, append.compiled.calls
    streams, buffers, lengths, cos, sin, _ = given
    fill = 3 - len(streams)
    into = buffers * (len(streams) if len(buffers) == 1 else 1)
    tables = [lengths, lengths] if cos is None else [cos, sin]
    wanted = [*streams, *streams[:1] * fill, *into, *into[:1] * fill, lengths, *tables]
    assert [x.dtype for x in first[:9]] == [x.dtype for x in wanted]
    assert list(call[9:18]) == [x.data_ptr() for x in wanted]


def test_an_append_is_refused_whatever_was_taken_before(kernels: dict[str, Kernel]) -> None:
    append = kernels["_append"]
    streams, buffers, lengths, *tables = appends.arguments("per head", [3, 6], 1, torch.float16, torch.float16)
    dba_append.dba_append(streams, buffers, lengths, *tables, admit=check_dba_append)
    wrong = [
        (streams, buffers, lengths.long(), *tables),
        (streams, buffers[:2], lengths, *tables),
        (streams, [*buffers[:2], buffers[2][..., :-1]], lengths, *tables),
        (streams, buffers, lengths, tables[0], None, tables[2]),
        (streams, buffers, lengths, *tables[:2], 3),
    ]
    for given in wrong:
        for _ in range(2):
            with pytest.raises(ConfigError, match="dba_append: "):
                dba_append.dba_append(*given, admit=check_dba_append)
    assert (len(append.given), append.compiled.calls) == (1, [])


def test_an_append_of_nothing_launches_nothing(kernels: dict[str, Kernel]) -> None:
    streams, buffers, lengths, *tables = appends.arguments("standard", [], 1, torch.float16, torch.float16)
    for _ in range(2):
        dba_append.dba_append(streams, buffers, lengths, *tables, admit=check_dba_append)
    assert kernels["_append"].given == []


def test_an_append_without_gradients_runs_the_launcher_and_counts_as_a_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def launched(*given: Any, admit: Any) -> None:
        admit(*given)
        calls.append(given)

    monkeypatch.setitem(backend.launchers, ("dba_append", appends.DEVICE), launched)
    streams, buffers, *rest = appends.arguments("per head", [3, 6], 1, torch.float32, torch.float32)
    with torch.no_grad():
        dba_append_op(streams, buffers, *rest)
        assert len(calls) == 1
        assert {x._version for x in buffers} == {1}, "a backward that kept them is refused"
        for wrong in (([], buffers), (streams, []), (streams, buffers[:2])):
            with pytest.raises(ConfigError, match="dba_append: "):
                dba_append_op(*wrong, *rest)
    with torch.inference_mode():
        dba_append_op(streams, [x.clone() for x in buffers], *rest)
    assert len(calls) == 2
    dba_append_op(streams, buffers, *rest)
    assert len(calls) == 2, "where gradients are taken it is the op that writes"
    assert all(x._version > 1 for x in buffers)
