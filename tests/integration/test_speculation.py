"""Twenty thousand texts of the speculative generator against the distribution of the model alone; compiled forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caramba.infer import Generator, SpeculativeGenerator
from tests.unit.infer.test_generator import sharp as sharpened
from tests.unit.infer.test_speculative import misfit, sharp
from tests.unit.model.model_specs import biased

N, ROWS = 20_000, 5_000


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft", "early_exit"])
def test_written_text_follows_the_model(method: str) -> None:
    model, draft = sharp("standard", by=4.5), sharp("standard", seed=7, by=4.5) if method == "draft" else None
    values: dict[str, Any] = {"temperature": 1.5, "top_k": 8, "top_p": 0.95, "max_new_tokens": 3}
    generator = SpeculativeGenerator(model, draft=draft, spec_method=method, spec_k=2, cache_kind="fp32", **values)
    found, bound = misfit(generator, N, ROWS)
    assert found < bound


def test_compiled_forwards_of_joined_layers_with_biases_are_compiled_once() -> None:
    model = sharpened(biased())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
    values: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    prompts = [[1, 2, 3, 4] * 3, [5, 6]]
    wanted = [row.tokens for row in Generator(model, **values).generate(prompts)]
    stepped = SpeculativeGenerator(model, compiled=True, spec_k=1, spec_k_adaptive=False, **values)
    compiled = []
    for _ in range(3):
        assert [row.tokens for row in stepped.generate(prompts)] == wanted
        assert (stepped.stats.decode, stepped.stats.not_compiled) == ("compiled", None)
        compiled.append(stepped.stats.compilations)
    assert 1 <= compiled[0] <= 2  # widths of 1 and 2 tokens
    assert compiled[1:] == [0, 0]
