"""Prompt lookup whose rounds run on the device by themselves: the text of plain decode, however wide rounds are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from caramba.config.generate import SpeculativeConfig
from caramba.data import ByteTokenizer
from caramba.infer import Generator, SpeculativeGenerator, verification
from caramba.infer.lookup_rounds import (
    FIRST_WORTH,
    N_DRAFTS,
    RATE,
    DraftController,
    LookupRounds,
    common_prefix_len,
)
from caramba.infer.verification import SpeculativeStats
from caramba.model import Model, build_model
from tests.examples import is_thorough
from tests.unit.model.model_specs import transformer

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
PROMPTS = [PROMPT, [5], [7, 8] * 6]
LONG: dict[str, Any] = {"max_new_tokens": 40, "cache_kind": "fp32"}
TARGETS = ["gqa_scaled", "decoupled_tie", "latent_gate"]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards as they would be compiled, without the minutes that compilation takes."""
    monkeypatch.setattr(verification, "compile_logits", lambda *_, run: run)


def sharp(name: str, by: float = 6.0) -> Model:
    model = build_model(transformer(name), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(by)
    return model.eval()


def stats_of(generator: SpeculativeGenerator) -> SpeculativeStats:
    assert isinstance(generator.stats, SpeculativeStats)
    return generator.stats


# Every pair of a target, one of these and a value of either option is seen.
SETTINGS: list[tuple[dict[str, Any], bool]] = [
    ({"temperature": 0.0}, False),
    ({"temperature": 0.0, "repetition_penalty": 1.2}, True),
    ({"temperature": 1.3}, True),
    (SAMPLED, False),
]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("values", "differ"), SETTINGS)
def test_the_text_is_that_of_plain_decode(target: str, values: dict[str, Any], differ: bool) -> None:
    model = sharp(target)
    several, one = (Generator(model, **LONG, **values).generate(prompts) for prompts in (PROMPTS, PROMPTS[:1]))
    is_even = (TARGETS.index(target) + SETTINGS.index((values, differ))) % 2 == 0
    for extra in (True, False) if is_thorough else (is_even,):
        given = {"spec_k": 9, "spec_k_adaptive": extra != differ, "spec_extra_token": extra, "compiled": True}
        generator = SpeculativeGenerator(model, **given, **LONG, **values)
        for plain in (several, one, several):  # on the context and buffers of the call before
            prompts = PROMPTS[: len(plain)]
            rows = generator.generate(prompts)
            assert [row.tokens for row in rows] == [row.tokens for row in plain]
            for mine, theirs in zip(rows, plain, strict=True):
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
            stats = stats_of(generator)
            assert (stats.decode, stats.not_batched) == ("compiled", None)
            assert stats.accepted <= stats.judged <= stats.drafted
            assert stats.accepted > 0 or values != {"temperature": 0.0}  # a likeliest text repeats itself
            assert stats.drafted <= N_DRAFTS * stats.row_steps
            # One token of each row comes from prefill, of others each is accepted or follows those; the last may be cut.
            assert stats.row_steps + stats.accepted >= stats.new_tokens - len(prompts)


def test_rounds_verify_several_tokens_only_where_drafts_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    launch = LookupRounds.launch
    monkeypatch.setattr(LookupRounds, "launch", lambda rounds, n: widths.append(n) or launch(rounds, n))
    model = sharp("gqa_scaled")
    values: dict[str, Any] = {"temperature": 0.0, "compiled": True, "spec_k": 5, **LONG}
    generator = SpeculativeGenerator(model, max_ngram=1, **values)
    monkeypatch.setattr(DraftController, "expected_accepted", lambda *_: 0.0)
    generator.generate([PROMPT])
    assert widths == [0] * 39
    assert stats_of(generator).drafted == 0
    monkeypatch.undo()
    monkeypatch.setattr(verification, "compile_logits", lambda *_, run: run)
    monkeypatch.setattr(LookupRounds, "launch", lambda rounds, n: widths.append(n) or launch(rounds, n))
    widths.clear()
    generator.generate([[5]])  # and another token: there is no draft at first
    assert (widths[0], 5 in widths, set(widths)) == (0, True, {0, 5})
    assert stats_of(generator).steps == len(widths) < 39


def test_rows_end_at_marks_and_stop_texts_and_stream_as_alone() -> None:
    spec = transformer("gqa_scaled").model_dump()
    spec["embedder"]["vocab_size"] = ByteTokenizer().vocab_size
    model = build_model(type(transformer("gqa_scaled")).model_validate(spec), seed=0).eval()
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 48, "cache_kind": "fp32"}
    prompts = ["abcabcabc", "x", "hello hello"]
    free = Generator(model, ByteTokenizer(), **options).generate(prompts)
    marks = [free[0].tokens[20], free[1].tokens[30]]
    text = free[2].text or ""
    options |= {"eos_token_id": tuple(marks), "stop": (text[12:15],)}
    plain = Generator(model, ByteTokenizer(), **options).generate(prompts)
    assert {row.finish for row in plain} == {"eos", "stop"}
    heard = ["", "", ""]

    def hear(index: int, piece: str) -> None:
        heard[index] += piece

    generator = SpeculativeGenerator(model, ByteTokenizer(), compiled=True, spec_k=7, **options)
    for _ in range(2):
        heard[:] = ["", "", ""]
        rows = generator.generate(prompts, on_text=hear)
        assert [(row.tokens, row.text, row.finish) for row in rows] == [
            (row.tokens, row.text, row.finish) for row in plain
        ]
        assert heard == [row.text for row in rows]
    alone = [generator.generate([prompt], seeds=[1337 + i])[0] for i, prompt in enumerate(prompts)]
    assert [row.tokens for row in alone] == [row.tokens for row in rows]


def test_a_draft_is_judged_by_the_text_whether_it_was_verified_or_not() -> None:
    pace = DraftController(SpeculativeConfig(max_ngram=6))
    assert [pace.worth[size] for size in (1, 4, 6)] == [FIRST_WORTH[0], FIRST_WORTH[3], FIRST_WORTH[3]]
    assert pace.learn(2, [1, 2, 3], [1, 2, 9], 3) == 2  # verified
    assert pace.worth[2] == pytest.approx(FIRST_WORTH[1] + RATE * (2 - FIRST_WORTH[1]))
    before = dict(pace.worth)
    assert pace.learn(3, [4, 5, 6], [4], 0) == 0  # not verified, and not decided yet
    assert pace.learn(0, [0, 0, 0], [5], 0) == 0
    assert pace.worth == before
    pace.learn(1, [7, 7, 7], [8], 0)  # of both: the older had 2 of 3, the newer none
    assert pace.worth[3] == pytest.approx(before[3] + RATE * (2 - before[3]))
    assert pace.worth[1] == pytest.approx(before[1] * (1 - RATE))
    assert common_prefix_len([1, 2], [1, 2, 3]) == common_prefix_len([1, 2, 3], [1, 2]) == 2


def test_drafts_gain_what_they_did_and_nothing_below_the_floor() -> None:
    pace = DraftController(SpeculativeConfig(window=8, retry_after=4, spec_disable_below_accept=0.4))
    assert pace.expected_accepted(0, 9) == 0.0
    assert pace.expected_accepted(4, 1) == 1.0
    assert pace.expected_accepted(4, 0) == 0.0
    first = pace.expected_accepted(4, 9)
    for _ in range(8):
        pace.learn(4, [1, 2, 3], [9], 3)
    assert (pace.expected_accepted(4, 9), pace.length.fallbacks) == (0.0, 1)
    pace.learn(4, [1, 2, 3], [1, 2, 3, 4], 0)
    assert 0 < pace.expected_accepted(4, 9) < first
    always = DraftController(SpeculativeConfig(spec_k_adaptive=False))
    assert (always.expected_accepted(1, 5), always.expected_accepted(0, 5)) == (5.0, 0.0)


def test_the_host_waits_for_the_stream_of_the_rounds_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = SpeculativeGenerator(sharp("gqa_scaled"), compiled=True, temperature=0.0, **LONG)
    copies: list[bool] = []
    copy = torch.Tensor.copy_

    def copied(into: torch.Tensor, given: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        copies.append(non_blocking)
        return copy(into, given, non_blocking=non_blocking)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", copied)
        generator.generate([PROMPT])
    assert set(copies) == {False}  # without an event nobody would wait for one
    rounds = generator._kept and generator._kept.rounds
    assert rounds is not None
    heard: list[Any] = []
    event = type("Event", (), {"record": lambda _, *streams: heard.append(streams)})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream", device))
    monkeypatch.setattr(rounds, "_read", event)
    with torch.inference_mode():
        rounds._send(torch.zeros(1, 3 + N_DRAFTS + 2, dtype=torch.int64), 1)
    assert heard == [(("stream", torch.device("cpu")),)]
