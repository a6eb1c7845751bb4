"""Metal launchers where a call has no kernel, a source does not compile, or a launch is wrong."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from caramba.kernels.metal import library

from caramba import kernels
from caramba.console import logger
from caramba.errors import ConfigError, KernelUnavailable
from caramba.ops.dba_decode import StoredStream, dba_decode
from caramba.ops.layer_norm import add_layer_norm, layer_norm
from caramba.ops.lion import lion_step
from caramba.ops.rms_norm import add_rms_norm, reference_rms_norm, rms_norm
from caramba.ops.rope import rope
from tests.ops.decode_cases import Case
from tests.ops.emulated import needs_compiler
from tests.ops.metal_cases import Call, decode_call, launcher, reference
from tests.ops.metal_emulator.library import Emulator, emulated_metal

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    library._refused.clear()
    kernels._logged.clear()
    yield
    library._refused.clear()
    kernels._logged.clear()


def refuse(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def compile_shader(source: str) -> Any:
        raise SyntaxError("program_source:7:5: error: use of undeclared identifier 'x'")

    library.compiled.cache_clear()
    monkeypatch.setattr(torch.mps, "compile_shader", compile_shader)
    said: list[str] = []
    monkeypatch.setattr(logger, "warning", said.append)
    return said


def test_a_source_that_does_not_compile_warns_once_and_runs_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said, run, x = refuse(monkeypatch), launcher("rms_norm"), torch.randn(3, 40)
    for _ in range(2):
        torch.testing.assert_close(run(x, None, 1e-6)[0], reference_rms_norm(x, None, 1e-6)[0], rtol=0, atol=0)
    assert len(said) == 1
    assert "rms_norm: kernels/metal/rms_norm.metal does not compile: program_source:7:5: error" in said[0]
    assert "the reference implementation runs instead" in said[0]


def test_a_source_that_does_not_compile_is_an_error_where_kernels_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(monkeypatch)
    monkeypatch.setitem(kernels._policies, "mps", "require")
    with pytest.raises(KernelUnavailable, match=r"rms_norm\.metal does not compile.*use kernels: auto"):
        launcher("rms_norm")(torch.randn(3, 40), None, 1e-6)


def test_calls_without_a_kernel_run_the_reference() -> None:
    with emulated_metal() as emulator:
        wide = torch.randn(2, 16, dtype=torch.float64)
        assert launcher("rms_norm")(wide, None, 1e-6)[0].dtype == torch.float64
        call = Call("dba_decode", torch.float32, decode_call(Case(("q8_0",) * 3, (70,), packed=64), torch.float32, 0))
        found, expected = (call.run(run) for run in (launcher("dba_decode"), reference("dba_decode")))
        torch.testing.assert_close(found, expected)
        assert emulator.launches == []


def test_a_head_too_wide_is_admitted_to_the_reference() -> None:
    q, k = torch.randn(1, 1, 1, 200), torch.randn(1, 1, 4, 200)
    lengths = torch.tensor([4], dtype=torch.int32)
    stream = StoredStream("fp32", k)
    expected = dba_decode(q, q, stream, stream, stream, lengths)
    from caramba.ops.dba_decode import _admit

    with emulated_metal() as emulator:
        given = (q, q, ["fp32"] * 3, [k], [k], [k], lengths, None, [], 0, 0, 0)
        found = launcher("dba_decode")(*given, admit=_admit)
        assert emulator.launches == []
    torch.testing.assert_close(found[0], expected[0])


def test_a_torch_without_shaders_is_named_with_the_version_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.delattr(torch.mps, "compile_shader")
    monkeypatch.setattr(kernels, "METAL_AVAILABLE", True)
    monkeypatch.setattr(kernels, "_policies", {})
    monkeypatch.setattr(logger, "info", said.append)
    assert set(kernels.load("mps").values()) == {"reference"}
    (line,) = said
    assert line.endswith("has no torch.mps.compile_shader; install torch 2.7 or later")
    with pytest.raises(KernelUnavailable, match=r"mps: .*no torch\.mps\.compile_shader.*use kernels: auto"):
        kernels.load("mps", "require")


def test_a_tensor_on_another_device_is_refused_with_both_devices() -> None:
    x, q, k = torch.randn(2, 8), torch.randn(1, 1, 2, 8), StoredStream("fp32", torch.randn(1, 1, 4, 8))
    w, table, lengths = torch.randn(8), torch.randn(1, 2, 4), torch.tensor([4], dtype=torch.int32)
    far = StoredStream("fp32", torch.empty(1, 1, 4, 8, device="meta"))
    calls: dict[str, Callable[[], object]] = {
        "rms_norm: weight": lambda: rms_norm(x, w.to("meta")),
        "add_rms_norm: residual": lambda: add_rms_norm(x, x.to("meta"), w),
        "layer_norm: bias": lambda: layer_norm(x, w, w.to("meta")),
        "add_layer_norm: weight": lambda: add_layer_norm(x, x, w.to("meta"), w),
        "rope: cos": lambda: rope(q, table.to("meta"), table.to("meta")),
        "lion_step: momentum 0": lambda: lion_step([x], [x.to("meta")], [x], lr=1.0, beta1=0.9, beta2=0.9),
        "dba_decode: k_geo": lambda: dba_decode(q, q, k, far, k, lengths),
    }
    for place, call in calls.items():
        with pytest.raises(ConfigError, match=f"{place}.* on meta.* cpu"):
            call()


def test_calls_with_more_threads_than_a_grid_has_positions_have_no_kernel() -> None:
    """Views whose rows are all one row: 2^28 rows of a simdgroup each, more elements than 32 bits count."""
    x = torch.zeros(1, 1).expand(2**28, 32)
    tall, tall_stat = torch.zeros(1, 1).expand(2**36, 32), torch.zeros(1).expand(2**36)
    groups = [[torch.zeros(1).expand(2**32)] for _ in range(3)]
    table = torch.zeros(1, 1, 1).expand(1, 2**28, 16)
    calls: dict[str, tuple[Any, ...]] = {
        "rms_norm": (x, None, 1e-6),
        "add_rms_norm": (x, x, None, 1e-6),
        "layer_norm": (x, None, None, 1e-6),
        "add_layer_norm": (x, x, None, None, 1e-6),
        "rms_norm_backward": (tall, None, tall, tall_stat, None),
        "layer_norm_backward": (tall, None, tall, tall_stat, tall_stat, None, None),
        "rope": (x.expand(1, 1, 2**28, 32), table, table, 1.0, False, torch.float32),
        "lion_step": (*groups, 1e-3, 0.9, 0.99, 0.0),
    }
    with emulated_metal() as emulator:
        for op, args in calls.items():
            module = importlib.import_module(f"caramba.kernels.metal.{MODULES.get(op, op)}")
            assert getattr(module, op)(*args) is NotImplemented, op
        assert emulator.launches == []


MODULES = {
    **{"add_rms_norm": "rms_norm", "rms_norm_backward": "rms_norm", "add_layer_norm": "layer_norm"},
    **{"layer_norm_backward": "layer_norm", "lion_step": "lion"},
}


KERNEL = """
#include <metal_stdlib>
using namespace metal;
kernel void probe(device float* x [[buffer(0)]], constant long& n [[buffer(1)]],
    uint i [[thread_index_in_threadgroup]], uint g [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float shared_[64];
    BODY
}
"""
WRONG = {
    "access outside of a buffer": "x[i + n] = 1.0f;",
    "access outside of a threadgroup array": "shared_[i + 64] = 1.0f; x[i] = 0.0f;",
    "race at byte .* of threadgroup memory": "shared_[i] = 1.0f; x[i] = shared_[63 - i];",
    "race at byte .* of a buffer": "x[0] = float(i);",
    "divergent barrier: thread 0 is at": (
        "if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "else threadgroup_barrier(mem_flags::mem_threadgroup);"
    ),
    "divergent barrier: thread 0 has ended": "if (i > 0) threadgroup_barrier(mem_flags::mem_threadgroup);",
    "divergent simdgroup": "if (lane != 3) x[i] = simd_sum(1.0f);",
    "simd_shuffle from lane 40, which is not there": "x[i] = simd_shuffle(1.0f, ushort(40));",
}

LANGUAGE = """
shared_[i] = float(i);
threadgroup_barrier(mem_flags::mem_threadgroup);
float4 four = float4(1.0f, 2.0f, 3.0f, 4.0f) * 2.0f;
x[i] = shared_[63 - i] + simd_max(float(lane)) + simd_shuffle_xor(float(lane), 1) + four.w + float(bfloat(1.0f / 3.0f)) +
    float(half(1.0f / 3.0f));
"""
ATOMICS = """
device atomic_int* counts = (device atomic_int*)(x + 1);
atomic_fetch_add_explicit((device atomic_float*)x, 0.5f, memory_order_relaxed);
atomic_fetch_max_explicit(counts, int(g * 64 + i), memory_order_relaxed);
if (i == 0) atomic_store_explicit(counts + 1 + g, 5, memory_order_relaxed);
"""
MIXED = "atomic_fetch_add_explicit((device atomic_float*)x, 1.0f, memory_order_relaxed); if (i == 7) x[0] = 0.0f;"
UNWRITTEN, NUMBER = "x[i] = shared_[i];", "x[i] = float(n);"


@functools.cache
def probes() -> dict[str, Any]:
    """Return the kernel with each of these bodies, compiled together."""
    bodies = (*WRONG.values(), LANGUAGE, ATOMICS, MIXED, UNWRITTEN, NUMBER)
    libraries = Emulator().compile_all([KERNEL.replace("BODY", body) for body in bodies])
    return {body: library.probe for body, library in zip(bodies, libraries, strict=True)}


@pytest.mark.parametrize("message", WRONG)
def test_the_emulator_stops_what_is_wrong(message: str) -> None:
    with pytest.raises(RuntimeError, match=rf"probe: group \(0, 0, 0\): .*{message}"):
        probes()[WRONG[message]](torch.zeros(64), 64, threads=64, group_size=64)


def test_the_emulator_computes_as_the_language_says() -> None:
    x = torch.zeros(64)
    probes()[LANGUAGE](x, 64, threads=64, group_size=64)
    i = torch.arange(64)
    third = torch.tensor(1 / 3)
    rounded = third.bfloat16().float() + third.half().float()
    torch.testing.assert_close(x, (63 - i) + 31 + (i % 32 ^ 1) + 8 + rounded)


def test_atomics_of_several_threadgroups_lose_nothing_and_are_no_race() -> None:
    probe = probes()[ATOMICS]
    for probe.emulator.seed in range(3):
        x = torch.zeros(6)
        probe(x, 64, threads=256, group_size=64)
        assert x[0] == 128
        assert x.view(torch.int32)[1:].tolist() == [255, 5, 5, 5, 5]


def test_an_atomic_and_a_plain_write_of_one_place_are_a_race() -> None:
    with pytest.raises(RuntimeError, match="race at byte 0 of a buffer"):
        probes()[MIXED](torch.zeros(64), 64, threads=64, group_size=64)


def test_memory_of_a_threadgroup_is_not_a_number_at_first() -> None:
    x = torch.zeros(64)
    probes()[UNWRITTEN](x, 64, threads=64, group_size=64)
    assert x.isnan().all()


def test_numbers_have_the_sizes_of_the_calling_convention() -> None:
    probe, x = probes()[NUMBER], torch.zeros(64)
    probe(x, 7, threads=64, group_size=64)
    assert x.eq(7).all()
    with pytest.raises(RuntimeError, match="argument 1 has 4 bytes, the kernel reads 8"):
        probe(x, 7, threads=64, group_size=64, arg_casts={1: "int32"})
    with pytest.raises(RuntimeError, match="argument 1 is a tensor, expected a number"):
        probe(x, x, threads=64, group_size=64)
    with pytest.raises(RuntimeError, match="expected groups of 1024 at most"):
        probe(x, 7, threads=4096, group_size=2048)
