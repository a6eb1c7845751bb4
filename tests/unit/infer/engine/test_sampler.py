"""Slots that draw together, each by its own settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caramba.config.generate import GenerateConfig
from caramba.infer.engine import sampler as sampler_module
from caramba.infer.engine.sampler import SlotSampler
from caramba.infer.step import distribution, uniforms
from caramba.ops.sample import argmax_logprob, draw

VOCAB, N = 31, 40
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 1.4, "top_k": 5},
    {"top_p": 0.6, "min_p": 0.1},
    {"top_p": 0.9, "top_k": 100, "repetition_penalty": 1.5},
    {"temperature": 0, "repetition_penalty": 0.7},
]


@pytest.mark.parametrize("which", [[0, 1, 2, 3, 4, 5], [0, 1], [1, 4], [0, 5], [0, 0]])
def test_each_slot_draws_what_it_draws_alone(which: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    one_pass: list[int] = []
    monkeypatch.setattr(sampler_module, "argmax_logprob", lambda given: one_pass.append(1) or argmax_logprob(given))
    configs = [GenerateConfig(max_new_tokens=N, **SETTINGS[index]) for index in which]
    sampler = SlotSampler(len(which) + 1, N, VOCAB, torch.device("cpu"))
    for slot, config in enumerate(configs):
        sampler.admit(slot, [slot, slot + 1], 5 + slot, config)
    seen = torch.zeros(len(which), VOCAB, dtype=torch.bool)
    for slot in range(len(which)):
        seen[slot, [slot, slot + 1]] = True
    generator = torch.Generator().manual_seed(0)
    for step in range(N):
        logits = 3 * torch.randn(len(which) + 1, VOCAB, generator=generator)
        sampler.choose(logits, sampler.form)
        sampler.send()
        tokens, logprobs = sampler.read()
        for slot, config in enumerate(configs):
            probs = distribution(logits[slot], config, seen[slot])
            expected = int(draw(probs, uniforms(5 + slot, N)[step]))
            assert tokens[slot] == expected
            assert logprobs[slot] == pytest.approx(float(logits[slot].log_softmax(-1)[expected]), abs=1e-6)
            seen[slot, expected] = True
    assert len(one_pass) == (N if which == [0, 0] else 0), "one pass over logits that nobody samples or weighs"
