"""Exact probabilities against a brute-force reference, and draws against those probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caramba.config.generate import GenerateConfig
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from caramba.infer.step import distribution, next_token, uniforms
from caramba.ops.sample import draw


def reference(logits: np.ndarray, config: GenerateConfig, seen: np.ndarray) -> np.ndarray:
    """One row, token by token, in plain loops."""
    scores = [float(z) for z in logits]
    if config.repetition_penalty != 1:
        for i in np.flatnonzero(seen):
            scores[i] = (
                scores[i] / config.repetition_penalty if scores[i] > 0 else scores[i] * config.repetition_penalty
            )
    if config.temperature == 0:
        return np.eye(len(scores))[int(np.argmax(scores))]
    top = max(scores)
    p = {i: np.exp((z - top) / config.temperature) for i, z in enumerate(scores)}

    def normal(p: dict[int, float]) -> dict[int, float]:
        total = sum(p.values())
        return {i: value / total for i, value in p.items()}

    p = normal(p)
    ranked = sorted(p, key=lambda i: (-p[i], i))
    if config.top_k is not None:
        p = normal({i: p[i] for i in ranked[: config.top_k]})
    if config.top_p < 1:
        kept: dict[int, float] = {}
        for i in sorted(p, key=lambda i: (-p[i], i)):
            if sum(kept.values()) >= config.top_p:
                break
            kept[i] = p[i]
        p = normal(kept)
    if config.min_p > 0:
        most = max(p.values())
        p = normal({i: value for i, value in p.items() if value >= config.min_p * most})
    return np.array([p.get(i, 0.0) for i in range(len(scores))])


SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.31, 1.0, 2.7]),
        "top_k": st.one_of(st.none(), st.integers(1, 14)),
        "top_p": st.sampled_from([0.053, 0.41, 0.87, 1.0]),
        "min_p": st.sampled_from([0.0, 0.063, 0.57, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.9]),
    }
)


@given(SETTINGS, st.integers(0, 10**6))
def test_probabilities_are_those_of_the_definition(values: dict[str, Any], seed: int) -> None:
    config = GenerateConfig(**values)
    generator = np.random.default_rng(seed)
    logits, seen = generator.normal(0, 3, (3, 11)), generator.random((3, 11)) < 0.4
    logits[1, 2:5] = logits[1, 2]  # equals: the lower id goes first
    found = distribution(torch.from_numpy(logits), config, torch.from_numpy(seen)).numpy()
    expected = np.stack([reference(row, config, s) for row, s in zip(logits, seen, strict=True)])
    assert np.array_equal(found > 0, expected > 0)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=0)


def test_draws_follow_the_probabilities() -> None:
    logits = torch.randn(9, generator=torch.Generator().manual_seed(1))
    p = distribution(logits, GenerateConfig(temperature=1.3, top_k=7))
    n = 50_000
    counts = np.bincount(draw(p.expand(n, -1), uniforms(5, n)).numpy(), minlength=9)
    assert not counts[p.numpy() == 0].any()
    kept = p.numpy() > 0
    expected = n * p.numpy()[kept]
    chi2 = float(((counts[kept] - expected) ** 2 / expected).sum())
    assert chi2 < 22.5, chi2  # 6 degrees of freedom: 99.9 %


def test_a_draw_never_takes_what_was_left_out() -> None:
    p = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0], dtype=torch.float64)
    edge = torch.tensor([0.0, 0.25 - 2**-53, 0.25, 1 - 2**-53, 1.0], dtype=torch.float64)
    assert draw(p.expand(5, -1), edge).tolist() == [1, 1, 3, 3, 3]


def test_a_small_temperature_stays_finite_and_tiny_top_p_keeps_one() -> None:
    logits = torch.tensor([3.0, 3.5, -1e4])
    assert distribution(logits, GenerateConfig(temperature=1e-300)).tolist() == [0, 1, 0]
    assert distribution(logits, GenerateConfig(top_p=1e-300)).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"temperature": -0.5}, r"temperature: got -0.5, expected greater than or equal to 0"),
        ({"temperature": float("nan")}, r"temperature: got nan, expected"),
        ({"top_k": 0}, r"top_k: got 0, expected"),
        ({"top_p": 0.0}, r"top_p: got 0.0, expected greater than 0"),
        ({"min_p": 1.5}, r"min_p: got 1.5, expected less than or equal to 1"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty: got 0.0"),
        ({"max_new_tokens": 0}, r"max_new_tokens: got 0"),
        ({"temprature": 1.0}, r"did you mean 'temperature'"),
    ],
)
def test_values_out_of_range_are_named(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_as(GenerateConfig, values)


@pytest.mark.parametrize("penalty", [1.0, 1.7])
def test_the_next_token_at_temperature_0_is_a_draw_from_the_distribution(penalty: float) -> None:
    logits = torch.randn(64, 11, generator=torch.Generator().manual_seed(1)).round(decimals=1)  # with equals
    seen, uniform = logits > 0.5, uniforms(3, 64)
    config = GenerateConfig(temperature=0.0, repetition_penalty=penalty)
    expected = draw(distribution(logits, config, seen), uniform)
    assert torch.equal(next_token(logits, config, seen, uniform), expected)
