"""State files: a context goes on bit for bit, and the state of another model is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from caramba.cache import Context, KVCacheKind
from caramba.data.checkpoint.tensors import save_tensors
from caramba.errors import ConfigError
from caramba.infer import load_state, save_state
from caramba.model import Model, build_model
from tests.unit.layer.test_memory_bank import memory_model, tokens
from tests.unit.model.model_specs import transformer


def begun(model: Model, kind: KVCacheKind = KVCacheKind.FP32) -> Context:
    ctx = model.new_context(2, 90, kind)
    with torch.no_grad():
        model(text(model)[:, :60], ctx)
    return ctx


def text(model: Model) -> torch.Tensor:
    return tokens() % model.spec.embedder.vocab_size


@pytest.mark.parametrize("kind", [KVCacheKind.FP32, KVCacheKind.BF16])
@pytest.mark.parametrize("has_slots", [True, False])
def test_loaded_state_goes_on_bit_equal(tmp_path: Path, kind: KVCacheKind, has_slots: bool) -> None:
    model = memory_model() if has_slots else build_model(transformer("standard"), seed=1).eval()
    ctx, restored = begun(model, kind), model.new_context(2, 90, kind)
    seen_tokens = text(model)[0, :60].tolist()
    save_state(tmp_path / "state.safetensors", model, ctx, seen_tokens)
    assert load_state(tmp_path / "state.safetensors", model, restored) == seen_tokens
    assert restored.position == 60
    rest = text(model)[:, 60:]
    with torch.no_grad():
        assert torch.equal(model(rest[:, :7], ctx), model(rest[:, :7], restored))
        for token in rest[:, 7:].split(1, dim=1):
            assert torch.equal(model(token, ctx), model(token, restored))


def test_state_of_another_model_format_slots_or_batch_is_refused(tmp_path: Path) -> None:
    model, path = memory_model(), tmp_path / "state.safetensors"
    save_state(path, model, begun(model))
    changed = memory_model()
    with torch.no_grad():
        changed.embedder.token.weight[0, 0] += 1
    more = memory_model(memory_slots=6)
    half = memory_model().bfloat16()
    for other, ctx, message in (
        (changed, changed.new_context(2, 90), "the state of another model"),
        (more, more.new_context(2, 90), "has slots 5, 5, the context here 6, 6"),
        (half, half.new_context(2, 90), "has dtype float32, the context here bfloat16"),
        (model, model.new_context(2, 90, KVCacheKind.BF16), "has cache fp32, the context here bf16"),
        (model, model.new_context(1, 90), "has batch 2, the context here 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_state(path, other, ctx)
        assert ctx.position == 0


def test_other_files_and_wrong_tokens_are_refused(tmp_path: Path) -> None:
    model, path = memory_model(), tmp_path / "state.safetensors"
    ctx = begun(model)
    with pytest.raises(ConfigError, match="got 3 tokens for a context that has seen 60"):
        save_state(path, model, ctx, [1, 2, 3])
    assert not path.exists()
    save_tensors(path, {"x": torch.zeros(2)})
    with pytest.raises(ConfigError, match="not a file of a context's state"):
        load_state(path, model, ctx)
