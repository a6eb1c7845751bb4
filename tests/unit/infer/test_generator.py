"""Generation on real tiny models: with cache and without, alone and in a batch, and every way to end."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.config.generate import GenerateConfig
from caramba.config.model import ModelSpec
from caramba.data import ByteTokenizer
from caramba.errors import CheckpointError, ConfigError
from caramba.infer import Generator, SpeculativeGenerator, decode, device_steps, generate, ragged
from caramba.infer.step import distribution, uniforms
from caramba.model import Model, build_model
from caramba.ops.sample import draw
from tests.unit.model.model_specs import VOCAB, transformer

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [3], [9, 8, 7, 6]]
SAMPLED: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.3}


def sharp(spec: ModelSpec) -> Model:
    model = build_model(spec, seed=0).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)
    return model


@pytest.fixture(scope="module", params=["gqa_scaled", "decoupled_gate", "latent_gate"])
def model(request: pytest.FixtureRequest) -> Model:
    return sharp(transformer(request.param))


@pytest.fixture(scope="module")
def byte_model() -> Model:
    return sharp(byte_spec())


def byte_spec() -> ModelSpec:
    spec = transformer("standard").model_dump()
    spec["embedder"]["vocab_size"] = 257
    return ModelSpec.model_validate(spec)


def slow(model: Model, prompt: list[int], n: int, seed: int) -> tuple[list[int], list[float]]:
    """Without a cache: a whole forward per token."""
    config, tokens, logprobs = GenerateConfig(**SAMPLED), list(prompt), []
    model.eval()
    for uniform in uniforms(seed, n):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]))[0, -1]
        seen = torch.zeros(VOCAB, dtype=torch.bool)
        seen[tokens] = True
        token = int(draw(distribution(logits, config, seen), uniform))
        logprobs.append(float(logits.log_softmax(-1)[token]))
        tokens.append(token)
    return tokens[len(prompt) :], logprobs


def test_batch_equals_single_equals_uncached(model: Model) -> None:
    batch = generate(model, PROMPTS, max_new_tokens=10, cache_kind="fp32", read_every=3, **SAMPLED)
    for index, (prompt, row) in enumerate(zip(PROMPTS, batch, strict=True)):
        (alone,) = generate(
            model,
            [prompt],
            seeds=[1337 + index],
            max_new_tokens=10,
            cache_kind="fp32",
            prefill_chunk=2,
            **SAMPLED,
        )
        tokens, logprobs = slow(model, prompt, 10, 1337 + index)
        assert list(row.tokens) == list(alone.tokens) == tokens
        assert row.logprobs == pytest.approx(logprobs, rel=1e-4, abs=1e-4)
        assert (row.finish, row.seed, row.text) == ("length", 1337 + index, None)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(model: Model, side: str) -> None:
    width = max(map(len, PROMPTS))
    tokens = torch.full((len(PROMPTS), width), 5)
    mask = torch.zeros_like(tokens)
    for index, prompt in enumerate(PROMPTS):
        at = slice(0, len(prompt)) if side == "right" else slice(width - len(prompt), width)
        tokens[index, at], mask[index, at] = torch.tensor(prompt), 1
    found = generate(model, tokens, mask=mask, max_new_tokens=4, cache_kind="fp32")
    assert found == generate(model, PROMPTS, max_new_tokens=4, cache_kind="fp32")


def test_rows_far_apart_in_length_run_after_each_other(model: Model) -> None:
    calls: list[tuple[int, ...]] = []
    handle = model.embedder.register_forward_hook(lambda module, args, out: calls.append(tuple(args[0].shape)))
    generate(model, PROMPTS, max_new_tokens=2, cache_kind="fp32", read_every=1)
    handle.remove()
    # Lengths 1 and 3, then 4, then 9: one to two tokens are fed to the shorter ones while the longer one catches up.
    assert calls == [(2, 1), (2, 1), (2, 1), (2, 1), (1, 4), (1, 1), (1, 9), (1, 1)]


def test_the_seed_decides(model: Model) -> None:
    def tokens(seed: int) -> tuple[int, ...]:
        return generate(model, [[1, 2]], seeds=[seed], max_new_tokens=12, temperature=2.0, cache_kind="fp32")[0].tokens

    assert tokens(5) == tokens(5)
    assert len({tokens(seed) for seed in range(6)}) > 1


def test_an_end_mark_ends_its_row_alone(model: Model) -> None:
    free = generate(model, PROMPTS, max_new_tokens=10, temperature=0, cache_kind="fp32")
    mark = free[0].tokens[4]
    for row, before in zip(
        generate(model, PROMPTS, max_new_tokens=10, temperature=0, eos_token_id=mark, cache_kind="fp32"),
        free,
        strict=True,
    ):
        at = before.tokens.index(mark) if mark in before.tokens else None
        assert row.tokens == before.tokens[:at]
        assert row.finish == ("length" if at is None else "eos")


def test_text_streams_and_stops_across_tokens(byte_model: Model) -> None:
    tokenizer, pieces = ByteTokenizer(), {0: "", 1: ""}

    def on_text(row: int, text: str) -> None:
        pieces[row] += text

    prompts = ["def f", "x = 1"]
    options = {"max_new_tokens": 24, "cache_kind": "fp32"}
    free = Generator(byte_model, tokenizer, **options).generate(prompts)
    stop = next(bytes(free[0].tokens[i : i + 2]).decode() for i in range(3, 22) if max(free[0].tokens[i : i + 2]) < 128)
    generator = Generator(byte_model, tokenizer, stop=(stop,), **options)
    rows = generator.generate(prompts, on_text=on_text)
    assert rows == generator.generate(prompts)
    for row, before in zip(rows, free, strict=True):
        assert row.text == pieces[free.index(before)] == (before.text or "").split(stop)[0]
        assert (row.finish == "stop") == (stop in (before.text or ""))
    assert generator.stats.new_tokens == sum(len(row.tokens) for row in rows)
    assert generator.stats.cache_bytes > 0


def test_the_mode_and_generator_of_the_caller_are_left_alone(model: Model) -> None:
    model.train()
    state = torch.random.get_rng_state()
    generate(model, [[1]], max_new_tokens=2, cache_kind="fp32")
    assert model.training
    assert torch.equal(state, torch.random.get_rng_state())
    model.eval()


@pytest.mark.parametrize(
    ("prompts", "values", "text"),
    [
        ([[]], {}, "prompt 0 is empty; give at least one token"),
        ([], {}, "got no prompts"),
        ([[1], [2, VOCAB]], {}, f"prompt 1 has token {VOCAB}, the model's vocabulary is 0 to {VOCAB - 1}"),
        (
            [[1, 2]],
            {"max_seq_len": 8, "max_new_tokens": 7},
            "exceed the 8 positions .*lower max_new_tokens to 6",
        ),
        ([[1] * 9], {"max_seq_len": 8, "max_new_tokens": 7}, "shorten the prompt"),
        (["text"], {}, "there is no tokenizer; give token ids"),
        ("text", {}, "expected a list of prompts"),
        ([[1]], {"stop": ("x",)}, "stop texts need a tokenizer"),
        ([[1]], {"temperature": -1.0}, "temperature: got -1.0"),
        (torch.ones(1, 3), {}, "expected integers"),
    ],
)
def test_bad_input_is_named(
    model: Model, prompts: list[list[int]] | Tensor, values: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        generate(model, prompts, **{"cache_kind": "fp32", **values})
    with pytest.raises(ConfigError, match=re.escape("got seeds [1, 2] for 1 prompts")):
        generate(model, [[1]], seeds=[1, 2], cache_kind="fp32")


def test_a_mask_with_a_gap_is_refused(model: Model) -> None:
    with pytest.raises(ConfigError, match="the mask of row 0 has a gap"):
        generate(model, torch.ones(1, 3, dtype=torch.int64), mask=torch.tensor([[1, 0, 1]]), cache_kind="fp32")


def test_logits_that_are_not_numbers_are_an_error() -> None:
    broken = sharp(transformer("standard"))
    with torch.no_grad():
        broken.embedder.token.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="new token 0 of row 0 are not numbers"):
        generate(broken, [[1]], cache_kind="fp32")


def test_device_steps_draw_the_same_and_say_what_ran(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_new_tokens": 5, **SAMPLED}
    plain = Generator(model, **options)
    wanted = plain.generate(PROMPTS)
    assert (plain.stats.decode, plain.stats.not_compiled) == ("eager", None)
    monkeypatch.setattr(device_steps, "compile_logits", lambda *_: device_steps.next_logits)
    stepped = Generator(model, compiled=True, **options)
    assert [row.tokens for row in stepped.generate(PROMPTS)] == [row.tokens for row in wanted]
    assert (stepped.stats.decode, stepped.stats.steps) == ("compiled", plain.stats.steps)
    other = Generator(model, compiled="graph", **options)
    other.generate(PROMPTS[:1])
    assert other.stats.decode == "eager"
    assert other.stats.not_compiled == "CUDA graphs need a CUDA device, the model is on cpu"


def test_eager_steps_plan_no_attention_for_the_length_of_each(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    planned, unplanned = list[int](), decode.unplanned_attention

    def noted(device: torch.device, n_pairs: int) -> Any:
        planned.append(n_pairs)
        return unplanned(device, n_pairs)

    for module in (decode, ragged):
        monkeypatch.setattr(module, "unplanned_attention", noted)
    Generator(model, max_new_tokens=4).generate([[1, 2, 3]])
    assert planned[-3:] == [4, 5, 6]  # the query and the keys of every step; the last token is never run
    lookup = SpeculativeGenerator(model, max_new_tokens=4)
    planned.clear()
    lookup.generate([[1, 2, 3]])
    assert len(planned) == lookup.stats.steps + 1  # the prompt, and every verification
    planned.clear()
    assert lookup.speed_up() is not None
    assert planned[-6:] == [2, 3, 4, 5, 6, 7]


def test_device_steps_on_blocks_draw_the_same(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_steps, "compile_logits", lambda *_: device_steps.next_logits)
    options: dict[str, Any] = {"max_new_tokens": 5, "cache_kind": "q8_0", **SAMPLED}
    plain, stepped = Generator(model, **options), Generator(model, compiled=True, **options)
    wanted = plain.generate(PROMPTS)
    assert [row.tokens for row in stepped.generate(PROMPTS)] == [row.tokens for row in wanted]
    assert stepped.stats.decode != "eager"
