"""The gate of a section: where problems are, derived numbers, and any text at all."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples

from caramba.paper.evidence import Evidence
from caramba.paper.gate import check_section
from caramba.paper.latex import NotAllowed, scan
from caramba.paper.literature import Record
from caramba.paper.numbers import digits_of_formulas

pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")

WORK = Record(
    "arxiv:1",
    "Llama 3.2 and GPT-4 with 5.3x less",
    ("A. Author",),
    "2017",
    abstract="It reaches 28.4 BLEU, in 1,000 steps.",
)
CITED = {"author2017llama": WORK}


def problems(body: str, evidence: Evidence, **named: bool) -> str:
    return "\n".join(check_section("results", body, evidence, CITED, **named).problems)


def test_problems_say_where(evidence: Evidence) -> None:
    assert problems("Fine.\n\nIt is 12 % 13\nand 14.", evidence).splitlines()[0].startswith("results, line 3: '12'")
    assert "results, line 4: '14'" in problems("Fine.\n\nIt is 12 % 13\nand 14.", evidence)


def test_numbers_from_two_results_are_computed(evidence: Evidence) -> None:
    one, other = "perplexity.student.nll", "perplexity.teacher.nll"
    assert evidence.derive("difference", one, other) == pytest.approx(2.342 - 2.301)
    assert evidence.derive("ratio", one, other) == pytest.approx(2.342 / 2.301)
    assert evidence.derive("percent_change", one, other) == pytest.approx(100 * (2.342 / 2.301 - 1))


def visible_digits(text: str) -> str:
    """What is left of a text without comments, told apart letter by letter and apart from the scanner."""
    kept, at = "", 0
    while at < len(text):
        if text[at] == "\\":
            kept += text[at : at + 2]
            at += 2
        elif text[at] == "%":
            at = text.find("\n", at) + 1 or len(text)
        else:
            kept += text[at]
            at += 1
    return kept


@settings(max_examples=examples(150), deadline=None)
@given(st.text(st.sampled_from("\\{}$%&_^~#[]()ab 12.,\n=*'\"beginendcite"), max_size=60))
@example("a \\% 12\n, b 1")
@example("\\\\% 12\n1")
@example("\\\\\\% 12\n1")
@example("$a\\%_1$\n")
@example("$%\n1$")
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = scan(text)
    except NotAllowed:
        return
    printed = "".join(letter for letter, _ in found.text)
    names = "".join("".join(use.arguments) for use in found.uses)
    visible = visible_digits(text)
    for digit in "12":  # every digit that is not in a comment is in one of the three
        assert (printed + digits_of_formulas(found.text) + names).count(digit) >= visible.count(digit)
