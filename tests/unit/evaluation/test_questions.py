"""verify eval and verify kvcache on real tiny models whose every answer is known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from caramba.config.model import ModelSpec
from caramba.config.verify import EvalVerifyConfig, KVCacheVerifyConfig
from caramba.data import ByteTokenizer
from caramba.errors import ConfigError, VerificationFailed
from caramba.evaluation import prepare_verification, verify
from caramba.evaluation.verification import first_integer, kvcache
from caramba.model import Model, build_model
from caramba.result import Verdict

EOS = 256
DBA = {"mode": "decoupled", "n_kv_heads": 1, "sem_dim": 2, "geo_dim": 2, "v_dim": 4}
GREEDY = {"id": "g", "kind": "int_greedy", "prompt": "2 + 2 = ", "answer": 4}
CHOICE = {"id": "c", "kind": "choice_logprob", "prompt": "ab", "choices": ["c", "dde"], "answer": 0}


def model_of(seed: int = 0, **attention: Any) -> Model:
    layer = {"type": "AttentionLayer", "d_model": 16, "n_heads": 2, **attention}
    spec = {
        "embedder": {"vocab_size": 257, "d_model": 16},
        "topology": {"type": "StackedTopology", "layers": [{"type": "ResidualTopology", "layers": [layer]}]},
        "head": {"tied": False, "bias": True},
    }
    model = build_model(ModelSpec.model_validate(spec), seed=seed).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20)
    return model


def saying(token: int) -> Model:
    """A model that continues everything with one token."""
    model = model_of()
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
        model.head.bias[token] = 5.0
    return model


def config(*cases: dict[str, Any], **keys: Any) -> EvalVerifyConfig:
    return EvalVerifyConfig.model_validate({"type": "eval", "cases": cases, **keys})


def verdict(chosen: EvalVerifyConfig, teacher: Model, student: Model) -> Verdict:
    (found,) = verify(
        [chosen],
        teacher,
        student,
        lambda *_: pytest.fail("asks no text"),
        run_id="r",
        device=torch.device("cpu"),
        tokenizer=ByteTokenizer(),
    )
    return found


def test_greedy_text_ends_at_the_limit_or_the_end_mark_and_no_integer_is_no_zero() -> None:
    zero = {**GREEDY, "id": "z", "answer": 0}
    chosen = config(GREEDY, zero, max_new_tokens=3, thresholds={"min_student_accuracy": 0.5, "max_accuracy_drop": 0.4})
    four, silent = saying(ord("4")), saying(EOS)
    found = verdict(chosen, four, silent)
    said = [[(answer.model, answer.text, answer.answer) for answer in case.answers] for case in found.cases]
    assert said == [[("teacher", "444", "444"), ("student", "", None)]] * 2
    assert [answer.is_correct for case in found.cases for answer in case.answers] == [False] * 4
    once = config(GREEDY, max_new_tokens=1, thresholds={"min_student_accuracy": 1.0, "max_accuracy_drop": 0.0})
    good = verdict(once, saying(EOS), four)
    assert good.passed
    assert {item.name: item.value for item in good.checks} == {
        "student_accuracy": 1.0,
        "teacher_accuracy": 0.0,
        "accuracy_drop": -1.0,
        "agreement": 0.0,
    }
    bad = verdict(once, four, silent)
    assert [item.name for item in bad.checks if not item.passed] == ["student_accuracy", "accuracy_drop"]


def direct(model: Model, prompt: bytes, choice: bytes) -> float:
    """log p(choice | prompt) from one forward over both."""
    ids = torch.tensor([[*prompt, *choice]])
    with torch.no_grad():
        logprobs = model(ids).double().log_softmax(-1)[0]
    return sum(logprobs[at - 1, ids[0, at]].item() for at in range(len(prompt), ids.shape[1]))


def test_choices_are_scored_as_one_forward_does_and_the_case_says_which_score_decides() -> None:
    choices = ["c", "dde", "fghij", "k"]
    for seed in range(50):  # until the two rules differ, so that the test can tell them apart
        model = model_of(seed)
        expected = [direct(model, b"ab", choice.encode()) for choice in choices]
        means = [total / len(choice) for total, choice in zip(expected, choices, strict=True)]
        raw, mean = expected.index(max(expected)), means.index(max(means))
        if raw != mean:
            break
    assert raw != mean
    both = [
        {**CHOICE, "choices": choices, "answer": raw},
        {**CHOICE, "id": "n", "choices": choices, "answer": choices[mean], "length_normalized": True},
    ]
    found = verdict(config(*both), model_of(seed=2), model)
    for case in found.cases:
        student = case.answers[1]
        assert student.logprobs == pytest.approx(expected, abs=1e-3)
        assert student.logprobs_per_token == pytest.approx(means, abs=1e-3)
        assert student.is_correct
        assert student.text is None


def test_each_kind_has_bounds_of_its_own() -> None:
    chosen = config(GREEDY, CHOICE, max_new_tokens=1, thresholds={"int_greedy": {"min_student_accuracy": 1.0}})
    found = verdict(chosen, saying(ord("4")), saying(ord("d")))
    values = {item.name: item.value for item in found.checks}
    assert values["student_accuracy_int_greedy"] == 0.0
    assert values["teacher_accuracy_int_greedy"] == 1.0
    assert {item.name for item in found.checks if not item.passed} == {"student_accuracy_int_greedy"}


def test_a_window_keeps_the_end_of_a_prompt_and_says_what_it_dropped() -> None:
    narrow = config({**CHOICE, "prompt": "xxxxxab"}, context_window=5, max_new_tokens=1)
    whole, short = verdict(config(CHOICE), model_of(), model_of(1)), verdict(narrow, model_of(), model_of(1))
    assert short.cases[0].dropped_tokens == 5
    assert short.cases[0].answers[1].logprobs == pytest.approx(whole.cases[0].answers[1].logprobs, abs=1e-4)


def test_a_diverged_student_is_a_failure_and_no_low_score() -> None:
    broken = model_of()
    with torch.no_grad():
        broken.head.bias.fill_(math.nan)
    with pytest.raises(VerificationFailed, match=r"student's log-probabilities of case 'c' are .*nan"):
        verdict(config(CHOICE), model_of(), broken)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so 12 or 13", "12"),
        ("= -007;", "-7"),
        ("+0", "0"),
        ("-0.5", "0"),
        ("x4y", "4"),
        ("none", None),
        ("", None),
    ],
)
def test_the_first_integer_of_a_text(text: str, expected: str | None) -> None:
    assert first_integer(text) == expected


@pytest.mark.parametrize(
    ("cases", "keys", "text"),
    [
        ([GREEDY, GREEDY], {}, "two cases have the id 'g'"),
        ([{**CHOICE, "answer": 2}], {}, r"answer=2 is no index of its 2 choices; use 0 to 1"),
        ([{**CHOICE, "answer": "x"}], {}, r"answer='x' is none of the choices 'c', 'dde'"),
        ([{**CHOICE, "choices": ["a", "a"]}], {}, "two choices are the same text"),
        ([{**GREEDY, "answer": "4"}], {}, "valid integer"),
        ([GREEDY], {"thresholds": {"choice_logprob": {"min_student_accuracy": 1}}}, "no case is of that kind"),
        ([GREEDY], {"context_window": 16}, "leaves no room for a prompt"),
        ([GREEDY], {"thresholds": {"min_accuracy": 1}}, "did you mean 'min_student_accuracy'"),
        ([], {}, "at least 1"),
    ],
)  # fmt: skip
def test_questions_that_make_no_sense_are_refused(cases: list[Any], keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        config(*cases, **keys)


def test_what_the_models_cannot_read_is_refused_without_a_model() -> None:
    specs = [model_of().spec]
    with pytest.raises(ConfigError, match=r"does not say which tokenizer made it; set tokenizer to `byte`"):
        prepare_verification(config(GREEDY), None, specs)
    tokenizer, (case,) = prepare_verification(config(GREEDY, tokenizer="byte"), None, specs)
    assert tokenizer.decode(case.prompt) == GREEDY["prompt"]
    small = specs[0].model_copy(update={"embedder": specs[0].embedder.model_copy(update={"vocab_size": 100})})
    with pytest.raises(ConfigError, match="has 257 entries, the models 100"):
        prepare_verification(config(GREEDY, tokenizer="byte"), None, [specs[0], small])
    learned = specs[0].model_copy(update={"embedder": specs[0].embedder.model_copy(update={"max_positions": 8})})
    with pytest.raises(ConfigError, match="context_window=20 exceeds the 8 positions"):
        prepare_verification(config(GREEDY, tokenizer="byte", context_window=20), None, [learned])
    with pytest.raises(ConfigError, match="case 'g' needs 16 tokens for its answer and the context window has 8"):
        prepare_verification(config(GREEDY, tokenizer="byte"), None, [learned])


def test_an_empty_prompt_begins_with_the_end_mark() -> None:
    _, (case,) = prepare_verification(config({**GREEDY, "prompt": ""}), ByteTokenizer(), [model_of().spec])
    assert case.prompt == (EOS,)


def test_cache_bytes_are_counted_planned_and_held_to_their_bounds() -> None:
    teacher, student = model_of(), model_of(**DBA)
    bounds = {"max_bytes_per_token": 16, "min_ratio": 4.0}
    chosen = KVCacheVerifyConfig.model_validate({"type": "kvcache", "kind": "fp16", "tokens": 5, **bounds})
    values = {item.name: item.value for item in kvcache(teacher, student, chosen)}
    assert values == {
        "bytes_per_token": 2.0 * (2 + 2 + 4),
        "teacher_bytes_per_token": 2.0 * 2 * 16,
        "ratio": 4.0,
        "plan_difference": 0.0,
        "bytes_per_token_layer0": 16.0,
    }
    assert all(item.passed for item in kvcache(teacher, student, chosen))
    tight = chosen.model_copy(update={"max_bytes_per_token": 15.9, "min_ratio": 4.01})
    failed = [item.name for item in kvcache(teacher, student, tight) if not item.passed]
    assert failed == ["bytes_per_token", "ratio"]
    quantised = KVCacheVerifyConfig.model_validate({"type": "kvcache", "kind": "mixed", "tokens": 5})
    values = {item.name: item.value for item in kvcache(teacher, student, quantised)}
    # a block of 32 for each stream of these narrow models, padding included
    assert values["bytes_per_token"] == 18 + 34 + 18
    assert values["teacher_bytes_per_token"] == 18 + 18
    assert values["plan_difference"] == 0
