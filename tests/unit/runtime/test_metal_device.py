"""What a run on Apple's GPU chooses, with the device's answers in place of a Mac."""

from __future__ import annotations

import pytest
import torch

from caramba.config.train import PhaseConfig
from caramba.runtime import device as facts
from caramba.runtime.device import (
    choose_precision,
    free_bytes,
    inference_dtype,
    is_out_of_memory,
    metal_facts,
    wide_dtype,
)

MPS = torch.device("mps")


@pytest.fixture(params=[True, False], ids=["bfloat16 agrees", "bfloat16 differs"])
def agrees(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(facts, "agrees_in_bfloat16", lambda device: request.param)
    return request.param


def test_dtypes_follow_one_product_in_bfloat16(agrees: bool) -> None:
    phase = PhaseConfig(phase="pretrain", steps=1)
    assert choose_precision(phase, MPS).dtype == ("bfloat16" if agrees else "float32")
    assert inference_dtype(MPS) == (torch.bfloat16 if agrees else torch.float16)
    assert inference_dtype(torch.device("cpu")) is None


def test_a_product_that_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    facts.agrees_in_bfloat16.cache_clear()
    assert facts.agrees_in_bfloat16(torch.device("cpu"))
    facts.agrees_in_bfloat16.cache_clear()
    monkeypatch.setattr(facts, "BF16_ERROR", 0.0)
    assert not facts.agrees_in_bfloat16(torch.device("cpu"))
    facts.agrees_in_bfloat16.cache_clear()


def test_float64_never_comes_to_the_device() -> None:
    assert wide_dtype(MPS) == torch.float32
    assert wide_dtype(torch.device("cpu")) == torch.float64


def test_memory_is_what_the_system_recommends_less_what_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 1000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 300)
    assert free_bytes(MPS) == 700
    assert is_out_of_memory(RuntimeError("Invalid buffer size: 24.00 GB"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 17.00 GB, max allowed: 18 GB)"))


def test_the_fallback_variable_is_reported_and_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    assert metal_facts()["fallback"] == "1"
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK")
    assert metal_facts()["fallback"] is None
