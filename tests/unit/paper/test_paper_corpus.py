"""The corpus of the gate: honest LaTeX passes; numbers, names and commands that are smuggled in are refused.

corpus.json: `says` are parts of the refusal; with `person` true a person may write it, in a section of their own.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from caramba.paper.evidence import Evidence
from caramba.paper.gate import check_section
from caramba.paper.literature import Record
from caramba.paper.numbers import number_words

pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")

CORPUS: dict[str, Any] = json.loads(Path(__file__).with_name("corpus.json").read_text())
CITED = {
    "author2017llama": Record(
        "arxiv:1",
        "Llama 3.2 and GPT-4 with 5.3x less",
        ("A. Author",),
        "2017",
        abstract="It reaches 28.4 BLEU, in 1,000 steps.",
    ),
    "a2017x": Record("arxiv:1", "A title", ("A B",), "2017", abstract="It is 28.4 of all."),
}
DEEP = [{"body": opening + "{" * 30_000, "says": ["too many groups within each other"]} for opening in ("", "$")]

ATTACKS = [*CORPUS["attacks"], *DEEP]


def problems(body: str, evidence: Evidence, **named: bool) -> str:
    return "\n".join(check_section("results", body, evidence, CITED, **named).problems)


def test_the_corpus_keeps_its_size() -> None:
    assert len(CORPUS["honest"]) >= 50
    assert len(ATTACKS) >= 235


@pytest.mark.parametrize("body", CORPUS["honest"])
def test_honest_latex_passes(body: str, evidence: Evidence) -> None:
    assert problems(body, evidence) == ""


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack["body"][:40].encode("unicode_escape").decode())
def test_attack_is_refused_with_its_reason(attack: dict[str, Any], evidence: Evidence) -> None:
    found = problems(attack["body"], evidence)
    assert found
    assert [part for part in attack["says"] if part not in found] == []
    is_refused = problems(attack["body"], evidence, numbers_are_free=True) != ""
    assert is_refused is not attack.get("person", False)  # a person may write numbers and nothing else


def test_plain_counts_are_no_number_words() -> None:
    text = "Two models, one block, three baselines; the first one, all three and neither of the two."
    assert list(number_words(text)) == []
    assert list(number_words("It takes fifty steps.")) == [("fifty", 9)]


@pytest.mark.parametrize("word", ["one ", "a half ", "X ", "five 5 ", "$x$ "])
def test_long_texts_take_little_time(word: str, evidence: Evidence) -> None:
    def took(count: int) -> float:
        began = time.process_time()
        problems(word * count, evidence)
        return time.process_time() - began

    took(100)
    assert took(8000) < 2.0
