"""Caches of layers with a window: any chunks equal the full forward, in memory that does not grow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.model.model_specs import VOCAB, block, spec
from torch import Tensor

from caramba.cache import DeviceContext, KVCacheKind, LayerKVCache, WindowLayerKVCache
from caramba.config.memory_bank import SPARE_TOKENS
from caramba.errors import ConfigError
from caramba.infer import Generator, SpeculativeGenerator, load_state, save_state
from caramba.infer.engine import Engine
from caramba.model import Model, build_model

LENGTH, WINDOW = 90, 5
NAMES: dict[str, dict[str, Any]] = {
    "standard": {},
    "gqa_scaled": {},
    "bottleneck": {},
    "decoupled_gate": {},
    "window": {"null_attn": True},
    "no_rope": {"q_chunk": 2},
}


def window_model(name: str = "standard", **values: Any) -> Model:
    windowed = block(name, **{"local_window": WINDOW, **values})
    model = build_model(spec(windowed, block("standard"), windowed), seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def tokens(n: int = LENGTH, rows: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [3, 40, 1, 17, 18, 11], [89, 1], [30, 30, 30]])
def test_window_cache_in_chunks_equals_full_forward(name: str, sizes: list[int]) -> None:
    model, x = window_model(name, **NAMES[name]), tokens()
    ctx = model.new_context(2, LENGTH, windowed=True)
    with torch.no_grad():
        full = model(x)
        chunks = torch.cat([model(part, ctx) for part in x.split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(chunks, full, atol=1e-5, rtol=1e-5)
    assert [type(cache) is WindowLayerKVCache for cache in ctx.caches] == [True, False, True]


def test_window_cache_bytes_are_constant_in_the_context() -> None:
    model = build_model(spec(block("standard", local_window=WINDOW)), seed=0).eval()
    contexts = [model.new_context(1, n, static=True, windowed=True) for n in (64, 1024, 131_072)]
    with torch.no_grad():
        for part in tokens(600, rows=1).split([500, *[1] * 100], dim=1):
            model(part, contexts[1])
    # 2 streams, 4 heads of 4 features in 4 bytes: the window and twice the spare tokens
    expected = 2 * 4 * 4 * 4 * (WINDOW + 2 * SPARE_TOKENS)
    assert {ctx.nbytes() for ctx in contexts} == {expected} == {contexts[1].used_bytes()}
    assert contexts[1].bytes_per_token == 0


@pytest.mark.parametrize("sizes", [[SPARE_TOKENS], [1] * SPARE_TOKENS, [9, 8]])
def test_rollback_of_spare_tokens_continues_as_if_no_more_was_seen(sizes: list[int]) -> None:
    model, x = window_model(), tokens()
    with torch.no_grad():
        full = model(x)
        for n_before in (4, 40, 61):
            ctx = model.new_context(2, LENGTH, windowed=True)
            for part in x[:, :n_before].split([1] * n_before, dim=1):
                model(part, ctx)
            for part in tokens(SPARE_TOKENS, seed=9).split(sizes, dim=1):
                model(part, ctx)
            ctx.truncate(n_before)
            torch.testing.assert_close(model(x[:, n_before:], ctx), full[:, n_before:], atol=1e-5, rtol=1e-5)


def test_failed_forward_leaves_a_window_cache_unchanged() -> None:
    model, x = window_model(), tokens()

    def fail(*_: Any) -> None:
        raise RuntimeError("last layer")

    with torch.no_grad():
        full = model(x)
        for n_failed in (3, 40):
            ctx = model.new_context(2, LENGTH, windowed=True)
            model(x[:, :30], ctx)
            hook = model.attention_layers()[-1][1].register_forward_pre_hook(fail)
            with pytest.raises(RuntimeError, match="last layer"):
                model(tokens(n_failed, seed=9), ctx)
            hook.remove()
            torch.testing.assert_close(model(x[:, 30:], ctx), full[:, 30:], atol=1e-5, rtol=1e-5)


def test_rollback_beyond_the_spare_tokens_is_refused() -> None:
    model = window_model()
    ctx = model.new_context(1, LENGTH, windowed=True)
    with torch.no_grad():
        for part in tokens(rows=1).split(1, dim=1):
            model(part, ctx)
    with pytest.raises(ConfigError, match="cannot roll 90 tokens back to 50"):
        ctx.truncate(50)


def test_rows_copies_and_saved_states_continue_bit_equal(tmp_path: Path) -> None:
    model, x = window_model(), tokens()
    ctx, restored = (model.new_context(2, LENGTH, windowed=True) for _ in range(2))
    with torch.no_grad():
        model(x[:, :60], ctx)
        save_state(tmp_path / "state.safetensors", model, ctx)
        load_state(tmp_path / "state.safetensors", model, restored)
        copied, swapped = ctx.clone(), ctx.clone()
        swapped.select(torch.tensor([1, 0]))
        expected = model(x[:, 60:], ctx)
        assert torch.equal(model(x[:, 60:], restored), expected)
        assert torch.equal(model(x[:, 60:], copied), expected)
        torch.testing.assert_close(model(x.flip(0)[:, 60:], swapped).flip(0), expected, atol=1e-5, rtol=1e-5)


def test_generators_keep_the_window_and_speculation_gives_the_same_text() -> None:
    model, values = window_model(), {"max_new_tokens": 60, "temperature": 0.0}
    prompts = [[1, 2, 3, 4] * 6]
    plain, drafted = Generator(model, **values), SpeculativeGenerator(model, spec_k=16, **values)
    whole = Generator(model, compiled=False, cache_kind="fp32", **values)
    (row,), (other,) = plain.generate(prompts), drafted.generate(prompts)
    assert row.tokens == other.tokens
    assert drafted.stats.drafted > 0
    ctx = model.new_context(1, 84, static=True)
    assert plain.stats.cache_bytes == drafted.stats.cache_bytes < ctx.nbytes()
    with torch.no_grad():
        logits = model(torch.tensor([[*row.prompt, *row.tokens]]))
    assert tuple(logits[0, 23:-1].argmax(-1).tolist()) == row.tokens
    assert whole.generate(prompts)[0].tokens == row.tokens


def test_decoding_with_a_window_keeps_that_window_of_a_full_layer() -> None:
    model = build_model(spec(block("standard")), seed=0).eval()
    values = {"max_new_tokens": 40, "temperature": 0.0}
    windowed = Generator(model, decode_local_window=4, **values)
    full = Generator(model, **values)
    windowed.generate([[1] * 60])
    full.generate([[1] * 60])
    assert windowed.stats.cache_bytes < full.stats.cache_bytes


def test_what_indexes_the_whole_cache_keeps_it() -> None:
    model = window_model()
    with pytest.raises(ConfigError, match="reads its cache from the host"):
        DeviceContext(model.new_context(1, LENGTH, static=True, windowed=True))
    with Engine(model, n_slots=2, max_len=80, prefix_cache_bytes=100_000) as engine:
        assert {type(cache) for cache in engine.batch.slots.ctx.caches} == {LayerKVCache}
    for options in ({"kind": KVCacheKind.Q8_0}, {}):
        length = LENGTH if options else WINDOW + 2 * SPARE_TOKENS
        ctx = model.new_context(1, length, windowed=True, **options)
        assert {type(cache) for cache in ctx.caches} == {LayerKVCache}
