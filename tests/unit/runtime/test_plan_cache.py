"""Measured plans in the caches' folder: replayed exactly, or left out with a warning; and the memory they rest on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from caramba.config.train import PhaseConfig
from caramba.runtime import (
    Decision,
    MemoryMeter,
    RuntimePlan,
    cached_plan,
    device_facts,
    free_bytes,
    is_out_of_memory,
    plan_path,
    signature_of,
    store_plan,
)

CPU = torch.device("cpu")
PHASE = PhaseConfig.model_validate({"phase": "pretrain", "steps": 10, "batch_size": "auto"})
FACTS = device_facts(CPU)


def test_a_signature_holds_what_speed_and_memory_depend_on() -> None:
    signature = signature_of(PHASE, FACTS, model={"d_model": 8})
    same = PHASE.model_copy(update={"lr": 0.5, "seed": 3, "steps": 99})
    assert signature_of(same, FACTS, model={"d_model": 8}) == signature
    others = [
        signature_of(PHASE.model_copy(update={"block_size": 64}), FACTS, model={"d_model": 8}),
        signature_of(PHASE.model_copy(update={"optimizer": "lion"}), FACTS, model={"d_model": 8}),
        signature_of(PHASE, {**FACTS, "torch": "1.0"}, model={"d_model": 8}),
        signature_of(PHASE, {**FACTS, "driver": "1"}, model={"d_model": 8}),
        signature_of(PHASE, FACTS, model={"d_model": 9}),
    ]
    assert len({signature, *others}) == 6
    timed = PHASE.model_copy(update={"compile_model": "auto"})
    assert signature_of(timed, FACTS) != signature_of(timed.model_copy(update={"steps": 99}), FACTS)


def test_plans_are_replayed_exactly_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path))
    signature = signature_of(PHASE, FACTS)
    assert cached_plan(signature) is None
    made = RuntimePlan("x", signature, FACTS, {"batch_size": Decision(24, "auto: measured", {"peak_bytes": 3.0})})
    path = store_plan(made)
    assert path.parent == tmp_path / "runtime_plans"
    assert cached_plan(signature) == made
    assert capsys.readouterr().err == ""
    path.write_text(path.read_text().replace(signature, "f" * 64))
    assert cached_plan(signature) is None
    for damage in ('{"x": {"signature"', '{"x": {"signature": "0"}}', "{}", "[]"):
        path.write_text(damage)
        assert cached_plan(signature) is None
    said = capsys.readouterr()
    assert (said.err + said.out).count("measuring again") == 5
    store_plan(made)
    assert cached_plan(signature) == made
    assert plan_path(signature) == path


def test_memory_is_measured_and_its_end_recognised() -> None:
    # More than malloc ever takes of what the heap holds (32 MB); the kernel counts resident pages a few hundred KB wrong.
    meter, size = MemoryMeter(CPU), 128 * 2**20
    meter.start()
    block = torch.ones(size // 4)
    assert meter.peak_bytes() > 0.9 * block.nbytes
    assert 0 < free_bytes(CPU) < 2**50
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(2**50, dtype=torch.float64)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
