"""Numbers that code prints, side by side: no other number is put together from them."""

from __future__ import annotations

import pytest

from caramba.paper import adjacent_numbers
from caramba.paper.check import check_section, report
from caramba.paper.evidence import Evidence
from caramba.paper.records import Record

CITED = {"a2017x": Record("arxiv:1", "A title", ("A B",), "2017", abstract="It is 28.4 of all.")}
V = r"\resultvalue{ratio.perplexity}"


def problems(body: str, evidence: Evidence, **named: bool) -> str:
    return report(check_section("results", body, evidence, CITED, **named).problems)


HONEST = [
    rf"They are {V}, {V} and {V}. {V} of it is {V}\%; ({V}/{V}) or {V}x, from {V} to {V}, or {V} minus {V}.",
    rf"\begin{{tabular}}{{lr}} a & {V} & {V} \\ {V} & {V} \\ \end{{tabular}}",
    rf"\begin{{itemize}}\item {V}\item {V}\end{{itemize}}",
    rf"a post-hoc value -- of {V}, {V}--{V} and ${V} - {V}$, $x - {V}$, $x = {V}$",
    r"Table~\ref{a}, Figures \ref{b} and~\ref{c}, Sections \ref{a}, \ref{b}, and \ref{c} (Fig.\ \ref{d}), \S\ref{e}",
    r"Eq.~(\ref{a}), Equation~\eqref{b}, by~\eqref{c}, Tables \ref{a}--\ref{b}, page~\pageref{a}, \autoref{c} and",
    r"(\citeyear{a2017x}), (see \citeauthor{a2017x}, \citeyear{a2017x}), \citeauthor{a2017x} (\citeyear{a2017x})",
    r"\citeauthor{a2017x}, \citeyear{a2017x}. Vaswani et al., \citeyear{a2017x}; Smith \citeyear{a2017x}, (\citealp{a2017x})",
    rf"It is {V}\footnote{{{V} on a CPU.}}.\artifactfigure{{summary.png}}{{{V}}}\begin{{center}}{V}\end{{center}}{V}",
    r"\citet{a2017x} reach \citednumber{a2017x}{28.4} of all \citep{a2017x}.",
]


@pytest.mark.parametrize("body", HONEST)
def test_honest_places_pass(body: str, evidence: Evidence) -> None:
    assert problems(body, evidence) == ""


REFUSED = [
    (r"\setting{seed}.\setting{seed}", adjacent_numbers.VALUES_MEET),
    (r"\setting{seed},\setting{seed}", adjacent_numbers.VALUES_MEET),
    (r"\setting{seed}{}\setting{seed}", adjacent_numbers.VALUES_MEET),
    (r"\setting{seed}{.}\setting{seed}", adjacent_numbers.VALUES_MEET),
    (r"\setting{seed} \setting{seed}", adjacent_numbers.VALUES_MEET),
    (r"\setting{seed}\,\setting{seed}", adjacent_numbers.VALUES_MEET),
    (r"\setting{seed}~\emph{\setting{seed}}", adjacent_numbers.VALUES_MEET),
    (r"\setting{seed}e\setting{seed}", adjacent_numbers.VALUES_MEET),
    ("\\setting{seed}.%\n  \\setting{seed}", adjacent_numbers.VALUES_MEET),
    (rf"{V}{V}", adjacent_numbers.VALUES_MEET),
    (rf"{V}\textsuperscript{{{V}}}", adjacent_numbers.VALUES_MEET),
    (rf"${V}$${V}$".replace("$$", "$ $"), adjacent_numbers.VALUES_MEET),
    (rf"${V}$.{V}", adjacent_numbers.VALUES_MEET),
    (rf"{V}$.${V}", adjacent_numbers.VALUES_MEET),
    (rf"{V}\begin{{tabular}}{{l}}{V}\end{{tabular}}", adjacent_numbers.VALUES_MEET),
    (rf"Table~\ref{{a}}.{V}", adjacent_numbers.VALUES_MEET),
    (r"\citednumber{a2017x}{28.4}\setting{seed}", adjacent_numbers.VALUES_MEET),
    (f"{V}\u00b7{V}", adjacent_numbers.VALUES_MEET),
    (rf"{V}$\cdot${V}", adjacent_numbers.VALUES_MEET),
    (rf"{V}$\prime${V}", adjacent_numbers.VALUES_MEET),
    (rf"is minus {V}", adjacent_numbers.NEGATED),
    (rf"$-{V}$", adjacent_numbers.NEGATED),
    (rf"is -{V}", adjacent_numbers.NEGATED),
    (rf"is --{V}", adjacent_numbers.NEGATED),
    (rf"is \textendash{{}}{V}", adjacent_numbers.NEGATED),
    (rf"$-${V}", adjacent_numbers.NEGATED),
    (rf"$x = -{V}$", adjacent_numbers.NEGATED),
    (r"\setting{seed}k", adjacent_numbers.SUFFIX),
    (r"$\setting{seed}M$", adjacent_numbers.SUFFIX),
    (r"fp16\setting{seed}", adjacent_numbers.TOUCHES_DIGIT),
    (r"\setting{seed}8-bit", adjacent_numbers.TOUCHES_DIGIT),
    (r"Table~\ref{a}.\ref{b}", adjacent_numbers.VALUES_MEET),
    (r"Table~\ref{a}\ref{b}", adjacent_numbers.VALUES_MEET),
    (r"is \ref{a}.\ref{b} times faster", adjacent_numbers.UNNAMED),
    (r"is \ref{a} times faster", adjacent_numbers.UNNAMED),
    (r"is \ref{a} and \ref{b}", adjacent_numbers.UNNAMED),
    (r"is (\ref{a}) times faster", adjacent_numbers.UNNAMED),
    (r"\pageref{a} times", adjacent_numbers.UNNAMED),
    (r"\citeyear{a2017x} tokens per second", adjacent_numbers.YEAR_LOOSE),
    (r"reaches \citeyear{a2017x}.", adjacent_numbers.YEAR_LOOSE),
    (r"(\citeyear{a2017x} tokens)", adjacent_numbers.YEAR_LOOSE),
    (r"Vaswani \citeyear{a2017x} tokens", adjacent_numbers.YEAR_LOOSE),
    (r"reaches \citealp{a2017x} points", adjacent_numbers.YEAR_LOOSE),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_numbers_are_not_put_together(body: str, message: str, evidence: Evidence) -> None:
    assert f"results, line 1: {message}" in problems(body, evidence)
    assert problems(body, evidence, numbers_are_free=True) == ""


def test_a_cited_number_is_of_one_work(evidence: Evidence) -> None:
    cited = {**CITED, "b": Record("arxiv:2", "Other", ("C D",), "2018")}
    found = report(check_section("results", r"\citednumber{a2017x,b}{28.4}", evidence, cited).problems)
    assert "\\citednumber names 2 works, expected one: the work whose abstract holds '28.4'" in found
