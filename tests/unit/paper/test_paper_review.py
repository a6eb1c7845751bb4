"""The deterministic checks on planted defects, and on clean papers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from caramba.paper.evidence import Evidence
from caramba.paper.review import check_paper

STUDENT, TEACHER = "perplexity.student.nll", "perplexity.teacher.nll"
LEADS = ("", "As expected, ", "On held-out text, ", "In this run, ", "After training, ")
CLEAN = rf"The student has \result{{{STUDENT}}} and its proxy teacher \result{{{TEACHER}}}."


def sentence(lead: str, text: str) -> str:
    return lead + text if lead else text[0].upper() + text[1:]


def planted() -> Iterator[tuple[str, str]]:
    """Yield 60 papers' results sections, each with one defect, and the check that must find it."""
    for lead in LEADS:
        yield "missing_baseline", sentence(lead, rf"the student, next to no proxy, has \result{{{STUDENT}}}.")
        yield "missing_baseline", sentence(lead, rf"we measure \resultvalue{{{STUDENT}}} with a proxy.")
        yield (
            "wrong_direction",
            f"{CLEAN} "
            + sentence(lead or "Then ", rf"the loss \result{{{STUDENT}}} is lower than \result{{{TEACHER}}}."),
        )
        yield (
            "wrong_direction",
            f"{CLEAN} "
            + sentence(
                lead or "Then ",
                rf"the student is \derived{{difference}}{{{STUDENT}}}{{{TEACHER}}} below its teacher.",
            ),
        )
        yield (
            "proxy_not_labelled",
            sentence(lead, rf"the student has \result{{{STUDENT}}}, the teacher \result{{{TEACHER}}}."),
        )
        yield (
            "missing_citation",
            f"{CLEAN} " + sentence(lead or "Yet ", "prior work reports the same effect."),
        )
        yield (
            "missing_citation",
            f"{CLEAN} " + sentence(lead or "Yet ", "Smith et al. report the same effect."),
        )
        yield (
            "unreferenced_figure",
            f"{CLEAN} " + sentence(lead or "We ", r"show \artifactfigure{summary.png}{All.}"),
        )
        yield (
            "single_seed",
            sentence(
                lead or "Here ",
                rf"our student improves on its proxy: \result{{{STUDENT}}}, \result{{{TEACHER}}}.",
            ),
        )
        yield (
            "single_seed",
            sentence(lead or "Here ", rf"the proxy \result{{{TEACHER}}} is better than \result{{{STUDENT}}}."),
        )
        yield "number_without_interval", f"{CLEAN} " + sentence(lead or "It ", r"takes \resultvalue{spread}.")
        yield (
            "number_without_interval",
            f"{CLEAN} " + sentence(lead or "So ", r"\resultvalue{spread} remains."),
        )


def clean() -> Iterator[str]:
    """Yield the results sections of papers without a defect."""
    for lead in LEADS:
        yield lead + CLEAN
        yield lead + rf"{CLEAN} Prior work reports the same \citep{{smith}}."
        yield (lead + rf"{CLEAN} Figure~\ref{{fig:summary.png}} shows it. \artifactfigure{{summary.png}}{{All.}}")
        yield lead + rf"{CLEAN} It takes \result{{spread}}."


def with_single_runs(evidence: Evidence) -> Evidence:
    """Evidence whose losses rest on one measurement, and one result with a dispersion."""
    results = dict(evidence.results)
    for key in (STUDENT, TEACHER):
        results[key] = dataclasses.replace(results[key], n=1, std=None, standard_error=None)
    results["spread"] = dataclasses.replace(results[STUDENT], key="spread", n=5, std=0.1, standard_error=None)
    return dataclasses.replace(evidence, results=results)


@pytest.fixture(name="facts")
def _facts(evidence: Evidence) -> Evidence:
    return with_single_runs(evidence)


def test_planted_defects_are_found(facts: Evidence) -> None:
    cases = list(planted())
    assert len(cases) == 60
    found = [check in {item.check for item in check_paper({"results": body}, facts)} for check, body in cases]
    missed = [case for case, is_found in zip(cases, found, strict=True) if not is_found]
    assert sum(found) >= 0.9 * len(cases), missed


@pytest.mark.parametrize("body", clean())
def test_clean_papers_have_no_finding(body: str, facts: Evidence) -> None:
    assert check_paper({"results": body}, facts) == []


def test_ids_stay_when_other_text_changes(facts: Evidence) -> None:
    first = check_paper({"results": rf"{CLEAN} It takes \resultvalue{{spread}}."}, facts)
    second = check_paper({"results": rf"{CLEAN} We wrote more here. So \resultvalue{{spread}} it is."}, facts)
    assert [item.id for item in first] == [item.id for item in second] != []
