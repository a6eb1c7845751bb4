"""Equal beginnings are run once, within their bytes, and change no token."""

from __future__ import annotations

import pytest
import torch

from caramba.errors import ConfigError
from caramba.infer import generate
from caramba.infer.engine import Engine
from caramba.infer.engine.prefix import PrefixCache, common
from caramba.model import Model
from tests.unit.infer.engine.test_engine import architecture, run
from tests.unit.infer.test_generator import sharp

SYSTEM = [(7 * index) % 23 for index in range(20)]


@pytest.fixture(scope="module", params=["decoupled", "latent_first", "Cyclic latent_first", "Recurrent decoupled"])
def model(request: pytest.FixtureRequest) -> Model:
    return sharp(architecture(request.param))


def test_equal_beginnings_are_run_once_and_change_nothing(model: Model) -> None:
    first = [*SYSTEM, 3, 4]
    plain = Engine(model, n_slots=2, max_len=64, cache_kind="fp32")
    kept = Engine(model, n_slots=2, max_len=64, cache_kind="fp32", prefix_cache_bytes=1 << 20)
    texts: list[list[tuple[int, ...]]] = []
    for engine in (plain, kept):
        asked = engine.submit(first, max_new_tokens=4, temperature=0)
        run(engine)
        # A turn that goes on from that text, one that parts from it early, and the same again.
        prompts = [[*first, *asked.tokens, 5], [*SYSTEM[:18], 9], first]
        tickets = [engine.submit(prompt, max_new_tokens=4, temperature=2.0, seed=4) for prompt in prompts]
        run(engine)
        texts.append([asked.tokens, *(ticket.tokens for ticket in tickets)])
        for prompt, ticket in zip(prompts, tickets, strict=True):
            (alone,) = generate(model, [prompt], max_new_tokens=4, temperature=2.0, seeds=[4], cache_kind="fp32")
            assert ticket.tokens == alone.tokens
    assert texts[0] == texts[1]
    stats = kept.stats()
    # Of the first text its last new token never ran.
    assert (stats.prefix_hits, stats.prefix_tokens) == (3, 22 + 3 + 18 + 21)
    assert stats.prefilled_tokens == plain.stats().prefilled_tokens - stats.prefix_tokens
    assert kept.batch.prefixes is not None
    assert 0 < stats.prefix_bytes == kept.batch.prefixes.nbytes <= 1 << 20
    assert plain.stats().prefix_hits == 0


def test_the_oldest_go_when_bytes_run_out() -> None:
    cache = PrefixCache(limit_bytes=3 * 80)
    texts = [[start, *range(1, 20)] for start in range(4)]
    for text in texts[:3]:
        cache.put(text, {"k": torch.zeros(1, 1, 20, 1)})
    assert cache.match([*texts[0], 5]) is not None
    cache.put(texts[3], {"k": torch.zeros(1, 1, 20, 1)})
    assert [cache.match([*text, 5]) is not None for text in texts] == [True, False, True, True]
    cache.put([*texts[0], 1, 2], {"k": torch.zeros(1, 1, 22, 1)})  # takes the place of its own beginning
    assert cache.nbytes == 88 + 80
    cache.put([9] * 90, {"k": torch.zeros(1, 1, 90, 1)})
    assert cache.nbytes == 88 + 80
    assert cache.match([9] * 20) is None
    found = cache.match([*texts[0][:17], 22, 22])
    assert found is not None
    assert (found[0], found[1]["k"].shape) == (17, (1, 1, 17, 1))
    assert common([1, 2, 3, 4], [1, 2, 9, 4]) == 2


def test_a_quantised_cache_keeps_no_prefix(model: Model) -> None:
    with pytest.raises(ConfigError, match="prefix_cache_bytes with cache_kind=q8_0"):
        Engine(model, max_len=32, cache_kind="q8_0", prefix_cache_bytes=1)
