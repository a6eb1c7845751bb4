"""Number words at the gate: claims are found whole and in little time, and plain counts pass."""

from __future__ import annotations

import time

import pytest

from caramba.paper.check import check_section, report
from caramba.paper.evidence import Evidence
from caramba.paper.number_words import claims
from caramba.paper.records import Record

CITED = {"a2017x": Record("arxiv:1", "A title", ("A B",), "2017")}


def problems(body: str, evidence: Evidence) -> str:
    return report(check_section("results", body, evidence, CITED).problems)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a perplexity of seven", ["seven"]),
        ("It reaches seven on a CPU", ["seven"]),
        ("it is three, the teacher has nine.", ["three", "nine"]),
        ("a loss of zero.", ["zero"]),
        ("six \u00d7 faster", ["six \u00d7"]),
        ("hundreds of times, dozens of runs and tens of steps", ["hundreds", "dozens", "tens of"]),
        ("an eighth of it, a third less and four fifths of all", ["an eighth", "a third", "four fifths"]),
        ("nine in ten, three out of four", ["nine", "ten", "three", "four"]),
        ("XII times, MMXXV tokens, VI layers and XIV", ["XII times", "MMXXV tokens", "VI layers", "XIV"]),
        ("seven GB in six ms", ["seven GB", "six ms"]),
        ("tenfold, ten-fold, twofold, quintupled", ["tenfold", "ten-fold", "twofold", "quintupled"]),
        ("one and a half times, one-half", ["one and a half times", "one-half"]),
        ("by two hundred and fifty", ["two hundred and fifty"]),
        ("two halves, two-thirds", ["two halves", "two-thirds"]),
        ("fifty\u2013two", ["fifty\u2013two"]),
    ],
)
def test_claims_are_found_whole(text: str, found: list[str]) -> None:
    assert [claim for claim, _ in claims(text)] == found


@pytest.mark.parametrize(
    "text",
    [
        "Two models, one block, three baselines and zero-shot accuracy",
        "the first one, neither of the two, all three, on the other hand, one of them, these two.",
        "a second model, a third party, a third model, one seventh-grade text, the fifth section",
        "Type III errors, Part II, MLP and CV, ML, CD, MIX",
        "half precision, half-open intervals, one at a time, one-to-one, that of one.",
        "we train two student models and three teachers, in two stages; each has four attention blocks",
        "initialised to zero, goes to zero, zero or more, two or three kinds, once more",
    ],
)
def test_plain_counts_are_no_claims(text: str) -> None:
    assert list(claims(text)) == []


@pytest.mark.parametrize(
    ("body", "number"),
    [
        (r"is six $\times$ faster", "six \u00d7"),
        (r"reaches $\mathrm{fifty}$ percent", "fifty percent"),
        (r"is $\mathit{seven}$ times faster", "seven times"),
        (r"is $s e v{e}n$ times faster", "seven times"),
        (r"$f^{}ifty$ percent", "fifty percent"),
        (r"$x_{seven}$ times", "seven times"),
        (r"fif$\mathrm{ty}$ percent", "fifty percent"),
        (r"is seven\,times faster", "seven times"),
        ("fif%\n  ty percent", "fifty percent"),
        ("is seven\n\u00a0\ntimes faster", "seven times"),
        (r"a perplexity of seven\footnote{On a CPU.} here", "seven"),
        (r"\begin{center}a perplexity of seven\end{center} models", "seven"),
        (r"\begin{tabular}{l}seven & models\end{tabular}", "seven"),
        (r"f\i fty percent", "fifty percent"),
        (r"\[ x = \mathrm{XII} \]", "XII"),
        (r"\[ \text{a perplexity of seven} \]", "seven"),
        (r"a \texttt{tw}\emph{ice}", "twice"),
        (r"reaches 2017 tokens per second \cite{a2017x}", "2017"),
        (r"in 2017 tokens \cite{a2017x}", "2017"),
        (r"a loss of 2017 \cite{a2017x}.", "2017"),
        (r"in 2018, \cite{a2017x}.", "2018"),
    ],
)
def test_words_and_years_that_count_are_refused(body: str, number: str, evidence: Evidence) -> None:
    assert f"{number!r} is a number that no artifact vouches for" in problems(body, evidence)


@pytest.mark.parametrize(
    "body",
    [
        r"In 2017, \citet{a2017x} began; since 2017 it is known (Author et al., 2017).",
        r"Author et al. 2017 \cite{a2017x} and their model (2017) were first.",
    ],
)
def test_years_of_cited_works_pass_where_they_read_as_years(body: str, evidence: Evidence) -> None:
    assert problems(body, evidence) == ""


@pytest.mark.parametrize("word", ["one ", "twenty ", "one and ", "a half ", "X ", "five 5 ", "1 2 "])
def test_long_texts_take_little_time(word: str, evidence: Evidence) -> None:
    def took(count: int) -> float:
        began = time.process_time()
        problems(word * count, evidence)
        return time.process_time() - began

    took(100)
    assert took(8000) < 2.0  # a pattern that begins anew at every word took 40 s
