"""State files: a context goes on bit for bit, and the state of another model is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from caramba.cache import Context, KVCacheKind
from caramba.config.model import ModelSpec
from caramba.data import ByteTokenizer
from caramba.data.checkpoint.header import read_metadata
from caramba.data.checkpoint.tensors import load_tensors, save_tensors
from caramba.errors import CheckpointError, ConfigError
from caramba.infer import Generator, load_state, save_state
from caramba.infer.chat_session import ChatSession
from caramba.infer.dialogue import Dialogue
from caramba.model import Model, build_model
from tests.unit.layer.test_memory_bank import memory_model, memory_spec, tokens
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


def byte_model(has_slots: bool = True, **changes: Any) -> Model:
    values = (memory_spec(**changes) if has_slots else transformer("standard")).model_dump(mode="json")
    values["embedder"] |= {"vocab_size": ByteTokenizer().vocab_size, "max_positions": None}
    return build_model(ModelSpec.model_validate(values), seed=4).eval()


def talk(model: Model, *, keeps_seen: bool = True, **values: Any) -> ChatSession:
    given = {"max_new_tokens": 12, "max_seq_len": 400, "temperature": 0.9, "seed": 3} | values
    generator = Generator(model, ByteTokenizer(), **given)
    generator.keeps_seen = keeps_seen
    return ChatSession(generator, Dialogue(ByteTokenizer()))


@pytest.mark.parametrize("has_slots", [True, False])
def test_a_saved_conversation_continues_bit_equal(tmp_path: Path, has_slots: bool) -> None:
    model, path = byte_model(has_slots), tmp_path / "talk.safetensors"
    whole, anew = talk(model), talk(model, keeps_seen=False)
    for line in ("hello", "and then?"):
        assert whole.say(line) == anew.say(line)
    whole.command(f"/save {path}")
    lengths: list[int] = []
    hook = model.embedder.register_forward_hook(lambda _, given, __: lengths.append(given[0].shape[1]))
    expected = whole.say("so?")
    hook.remove()
    # The answer before, bytes of which may be no text and take three, and the new message
    assert lengths[0] <= len("User: so?\nAssistant:") + 3 * 12 + 2
    restored = talk(model)
    restored.say("another conversation")
    restored.command(f"/load {path}")
    assert restored.say("so?") == expected
    assert restored.turns == whole.turns
    assert restored.generator.seen is not None
    assert whole.generator.seen is not None
    state = whole.generator.seen.ctx.state_dict()
    assert all(torch.equal(x, state[name]) for name, x in restored.generator.seen.ctx.state_dict().items())
    assert restored.context == whole.context


def test_a_conversation_that_cannot_be_saved_or_continued_is_refused(tmp_path: Path) -> None:
    model, path = byte_model(), tmp_path / "talk.safetensors"
    session = talk(model)
    with pytest.raises(ConfigError, match="/save has no state to write; first get an answer"):
        session.command(f"/save {path}")
    session.say("hello")
    with pytest.raises(ConfigError, match="/save needs a file"):
        session.command("/save")
    file = tmp_path / "file"
    file.write_text("no folder")
    with pytest.raises(ConfigError, match="/save cannot write"):
        session.command(f"/save {file / 'talk.safetensors'}")
    session.command(f"/save {path}")
    with_system = talk(model)
    with_system.dialogue.system = [{"role": "system", "content": "Be brief."}]
    for other, message in (
        (talk(byte_model(memory_slots=6)), "has slots 5, 5, the context here 6, 6"),
        (talk(model, cache_kind="bf16"), "has cache fp32, the context here bf16"),
        (talk(model, cache_kind="auto"), "with --cache-kind fp32, .*; got auto"),
        (talk(model, keeps_seen=False), "continues without speculation"),
        (with_system, "has system=.*give --system and --plain as they were"),
    ):
        with pytest.raises(ConfigError, match=message):
            other.command(f"/load {path}")
        assert not other.turns
        assert other.generator.seen is None
    tensors, metadata = load_tensors(path), read_metadata(path)
    for key, text, message in (
        ("conversation", "{", "conversation cannot be read"),
        ("conversation", '{"turns": 3}', "conversation.turns cannot be read"),
        ("tokens", '["a"]', "tokens.0 cannot be read"),
    ):
        save_tensors(path, tensors, metadata | {key: text})
        with pytest.raises(CheckpointError, match=message):
            session.command(f"/load {path}")
        assert len(session.turns) == 1
    save_state(path, model, begun(model))
    with pytest.raises(ConfigError, match="a state without a conversation"):
        session.command(f"/load {path}")
    session.command("/reset")
    with pytest.raises(ConfigError, match="/save has no state"):
        session.command(f"/save {path}")
