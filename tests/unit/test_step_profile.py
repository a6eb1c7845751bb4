"""The table of a traced step: FLOPs and bytes from shapes, gaps to the roofs, idle time, on a trace written by hand."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench"
BF16 = "c10::BFloat16"


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("cases.step_profile")


def op(number: int, name: str, ts: float, dur: float, dims: list[Any], tid: int = 1) -> dict[str, Any]:
    args = {"External id": number, "Input Dims": dims, "Input type": [BF16 if item else "" for item in dims]}
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def kernel(number: int | None, name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    args = {**({} if number is None else {"External id": number}), **more}
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": args}


Q, K = [1, 4, 64, 16], [1, 2, 64, 16]
EVENTS = [
    op(1, "aten::mm", 0, 5, [[64, 32], [32, 128]]),
    kernel(1, "nvjet_tst_128x64", 100, 20),
    op(2, "aten::_scaled_dot_product_cudnn_attention", 5, 5, [Q, K, K, []]),
    kernel(2, "cudnn_generated_sdpa_fprop", 120, 10),
    op(3, "aten::_scaled_dot_product_cudnn_attention_backward", 10, 5, [Q, Q, K, K, Q]),
    kernel(3, "cudnn_generated_sdpa_bprop", 130, 30),
    op(4, "triton_poi_fused_silu_mul_3", 15, 1, [[64, 100], [64, 100], [], []]),
    # 10 us of nothing before a kernel that is known by its launch alone:
    {"ph": "X", "cat": "cuda_driver", "name": "cuLaunchKernelEx", "ts": 15.2, "dur": 0.5, "tid": 1}
    | {"args": {"correlation": 77}},
    kernel(None, "triton_poi_fused_silu_mul_3", 170, 10, correlation=77),
    op(5, "aten::_fused_adamw_", 16, 9, [[], [], []]),
    kernel(5, "void at::native::multi_tensor_apply_kernel<at::native::A>(x)", 180, 40),
    kernel(5, "void at::native::multi_tensor_apply_kernel<at::native::A>(x)", 220, 40),
    kernel(None, "Memcpy DtoD (Device -> Device)", 250, 20, bytes=4096)
    | {"cat": "gpu_memcpy"},  # beside the last
]


def test_calls_stand_beside_the_roofs_of_their_shapes(profile: ModuleType, tmp_path: Path) -> None:
    roofs = profile.Roofs(flops=1e12, bytes=1e9, optimizer_bytes=20_000)
    out = tmp_path / "p.json"
    trace = tmp_path / "t.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": [{"ph": "M"}, *EVENTS]}).encode()))
    said = profile.report(trace, 2, None, roofs, out, {"made_by": "x", "machine": {}})
    found = json.loads(out.read_text())
    calls = {row["name"]: row for row in found["calls"]}
    mm = calls["aten::mm [64, 32] x [32, 128]"]
    assert mm["calls"] == 0.5
    assert mm["tflops"] == pytest.approx(2 * 64 * 32 * 128 / 20e-6 / 1e12)
    assert mm["roof_ms"] == pytest.approx(1e3 * 2 * (64 * 32 + 32 * 128) / 1e9 / 2), (
        "bound by bytes at these roofs"
    )
    forward = 4 * 4 * 64 * 64 * 16 / 2
    classes = found["classes"]
    tflops = {row["class"]: row["tflops"] * row["ms"] * 2e9 for row in found["calls"]}
    assert tflops["attention"] == pytest.approx(forward)
    assert tflops["attention backward"] == pytest.approx(2.5 * forward)
    assert calls["triton_poi_fused_silu_mul_3"]["tb_s"] == pytest.approx(2 * 64 * 100 * 2 / 10e-6 / 1e12)
    assert calls["triton_poi_fused_silu_mul_3"]["roof_ms"] == pytest.approx(0.005), "no more than it took"
    assert classes["optimiser"] == {"ms": 0.04, "roof_ms": pytest.approx(0.02), "calls": 0.5}
    assert calls["Memcpy DtoD"]["roof_ms"] == pytest.approx(0.002048)
    assert (found["busy_ms"], found["idle_ms"]) == (pytest.approx(0.08), pytest.approx(0.005))
    assert found["idle_between"] == [
        {"between": "cudnn_generated_sdpa_bprop -> triton_poi_fused_silu_mul_3", "ms": 0.005}
    ]
    timed = profile.analyse(EVENTS, 2, roofs, step_ms=0.2)
    assert timed["idle_ms"] == pytest.approx(0.12), "of a step that the profiler did not slow"
    assert (timed["gaps"][0]["what"], timed["traced_idle_ms"]) == ("device idle", pytest.approx(0.005))
    gaps = found["gaps"]
    assert [gap["gap_ms"] for gap in gaps] == sorted((gap["gap_ms"] for gap in gaps), reverse=True)
    assert len(gaps) == 5
    assert (gaps[0]["class"], gaps[0]["gap_ms"]) == ("optimiser", pytest.approx(0.02))
    assert "| optimiser | 0.04 |" in "\n".join(said["lines"])
    assert "`aten::_fused_adamw_`" in out.with_suffix(".md").read_text()


def test_without_a_device_ops_have_their_own_time(profile: ModuleType) -> None:
    events = [
        op(1, "aten::linear", 0, 10, [[4, 8], [16, 8]]),
        op(2, "aten::mm", 2, 6, [[4, 8], [8, 16]]),
        op(3, "aten::mm", 3, 4, [[4, 8], [8, 16]], tid=2),
    ]
    found = profile.analyse(events, 1, profile.Roofs(1e12, 1e12))
    assert not found["is_device"]
    assert {row["name"]: row["ms"] for row in found["calls"]} == {
        "aten::linear [4, 8] x [16, 8]": pytest.approx(0.004),
        "aten::mm [4, 8] x [8, 16]": pytest.approx(0.010),
    }
    assert found["calls"][0]["tflops"] == pytest.approx(2 * 2 * 4 * 8 * 16 / 10e-6 / 1e12)


def test_bytes_of_our_ops_hold_what_they_write(profile: ModuleType) -> None:
    calls = importlib.import_module("cases.step_profile")
    shapes = [[4, 8], [4, 16]]
    assert calls._bytes("caramba::swiglu_packed_backward", shapes, [BF16, BF16]) == 2 * (32 + 64 + 64)
    assert calls._bytes("caramba::swiglu_packed", shapes[1:], [BF16]) == 2 * (64 + 32)
    assert calls._bytes("triton_poi_fused_mul_0", shapes, [BF16, BF16]) == 2 * (32 + 64)


def test_every_gap_of_the_page_says_what_was_done(
    profile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, verdicts = (importlib.import_module(name) for name in ("report", "verdicts"))
    roofs = profile.Roofs(flops=1e12, bytes=1e9, optimizer_bytes=20_000)
    found = profile.analyse(EVENTS, 2, roofs, 1.0)
    lines = report.section("step_profile", {"model": "x", **found}).splitlines()
    said = lines[lines.index("What was done about each:") + 2 :][: profile.GAPS]
    assert [line.split("`")[1] for line in said] == [gap["what"].split(" [")[0] for gap in found["gaps"]]
    about = {line.split("`")[1]: line.split("): ", 1)[1] for line in said}
    assert about["device idle"].startswith("Blocks are compiled one by one")
    found["gaps"][0]["what"] = "another kernel [3]"
    assert any(
        line.startswith("- `another kernel` (") and line.endswith("): **nothing yet**.")
        for line in report.section("step_profile", found).splitlines()
    )
    notes = json.loads(verdicts.NOTES.read_text())
    assert all(note["match"] and note["done"] for note in notes)
