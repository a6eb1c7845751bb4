"""Ten thousand generated tokens take the memory of their cache, allocated at the start, and no more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.infer.step import StepState
from caramba.model import Model, build_model

N_TOKENS, BOUND = 10_000, 4e6


def small_model() -> Model:
    norm = {"type": "RMSNormLayer", "d_model": 8}
    attention = {"type": "AttentionLayer", "d_model": 8, "n_heads": 1, "mode": "gqa", "n_kv_heads": 1}
    layers = [{"type": "ResidualTopology", "layers": [norm, attention]}]
    spec = {
        "embedder": {"vocab_size": 256, "d_model": 8},
        "topology": {"type": "StackedTopology", "layers": layers},
    }
    return build_model(ModelSpec.model_validate(spec), seed=0).eval()


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_flat_over_ten_thousand_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    read = StepState.read

    def watched(*given: Any) -> bool:
        seen.append(resident())
        return read(*given)

    monkeypatch.setattr(StepState, "read", watched)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only wait for each other
    try:
        generator = Generator(small_model(), max_new_tokens=N_TOKENS, temperature=1.0, eos_token_id=[])
        (row,) = generator.generate([[1]])
    finally:
        torch.set_num_threads(threads)
    assert len(row.tokens) == N_TOKENS
    assert generator.stats.cache_bytes == (N_TOKENS + 1) * 2 * 8 * 4
    assert len(seen) > 1000
    assert seen[-1] - seen[len(seen) // 10] < BOUND  # the rest of the cache's pages and the tokens themselves
