"""The gate of a section: every number, citation, figure and reference that it holds must be one that code knows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from caramba.errors import CarambaError, nearest
from caramba.paper.evidence import Evidence
from caramba.paper.latex import Finding, NotAllowed, Scanned, Use, scan
from caramba.paper.numbers import Names, adjacent, in_formula, in_prose
from caramba.paper.records import Record
from caramba.paper.vocabulary import OPERATIONS

CITING = ("cite", "citep", "citet", "citealt", "citealp", "citeauthor", "citeyear")
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9:_-]*")
_APART = "; digits in a formula without an operator between them read as one number"
MOST = 12


@dataclass(frozen=True)
class Problem:
    """Why a section cannot be taken: where, what was found, and what to do."""

    section: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.section}, line {self.line}: {self.text}"


@dataclass(frozen=True)
class Checked:
    """A section that was read: what it uses, and its problems, of which an accepted one has none."""

    scanned: Scanned
    problems: tuple[Problem, ...]


def check_section(
    name: str, body: str, evidence: Evidence, cited: Mapping[str, Record], *, numbers_are_free: bool = False
) -> Checked:
    """Check one section against the run's evidence and the works that may be cited, by their keys.

    `numbers_are_free` is for a section that a person edited: its digits are the person's own.
    """
    try:
        scanned = scan(body)
    except NotAllowed as error:
        return Checked(Scanned(), (Problem(name, error.line, error.text),))
    problems: list[Problem] = []
    for use in scanned.uses:
        problems += [Problem(name, use.line, text) for text in _wrong(use, evidence, cited)]
    if not numbers_are_free:
        problems += _numbers(name, scanned, evidence, cited)
    return Checked(scanned, tuple(problems))


def report(problems: tuple[Problem, ...] | list[Problem]) -> str:
    """Return problems as text for the model or a person."""
    shown = [str(problem) for problem in problems[:MOST]]
    more = [f"… and {len(problems) - MOST} more"] if len(problems) > MOST else []
    return "\n".join([*shown, *more])


def derive(operation: str, first: str, second: str, evidence: Evidence) -> float:
    """Compute a number from two results.

    Raises:
        CarambaError: unknown operation or key, different units, or a division by zero.
    """
    if operation not in OPERATIONS:
        raise CarambaError(
            f"{operation!r} is no operation{nearest(operation, OPERATIONS) or ';'} they are {', '.join(OPERATIONS)}"
        )
    one, other = evidence.result(first), evidence.result(second)
    if one.unit != other.unit:
        raise CarambaError(f"{first} is in {one.unit or 'no unit'} and {second} in {other.unit or 'no unit'}")
    if operation == "difference":
        return one.value - other.value
    if other.value == 0:
        raise CarambaError(f"{second} is 0; nothing is relative to it")
    return one.value / other.value if operation == "ratio" else 100 * (one.value / other.value - 1)


def _wrong(use: Use, evidence: Evidence, cited: Mapping[str, Record]) -> list[str]:
    command, arguments = use.command, use.arguments
    try:
        if command in ("result", "resultvalue"):
            evidence.result(arguments[0])
        elif command == "derived":
            derive(arguments[0], arguments[1], arguments[2], evidence)
    except CarambaError as error:
        return [str(error)]
    if command == "setting":
        return _unknown(arguments[0], evidence.settings, "setting", "get_experiment_manifest lists them")
    if command == "artifactfigure":
        return _unknown(arguments[0], evidence.figures, "figure", "list_artifacts lists them")
    if command == "artifacttable":
        return _unknown(arguments[0], evidence.tables, "table", "list_artifacts lists them")
    if command in CITING or command == "citednumber":
        keys = [key.strip() for key in arguments[0].split(",")]
        wrong = [
            text for key in keys for text in _unknown(key, cited, "citation", "add_citation makes a key")
        ]
        if command == "citednumber" and len(keys) > 1:
            wrong.append(
                f"\\citednumber names {len(keys)} works, expected one: the work whose abstract holds {arguments[1]!r}; "
                "cite the others with \\citep"
            )
        elif command == "citednumber" and not wrong and not cited[keys[0]].states(arguments[1]):
            wrong.append(
                f"{arguments[1]!r} does not stand in the abstract of {keys[0]}; quote a number that does"
            )
        return wrong
    if command == "label" and not _LABEL.fullmatch(arguments[0]):
        return [f"label {arguments[0]!r}: expected letters, digits, : - and _, such as sec:setup"]
    return []


def _unknown(name: str, known: Mapping[str, object], kind: str, where: str) -> list[str]:
    return [] if name in known else [f"{name!r} is no {kind}{nearest(name, known) or f'; {where}'}"]


def section_names(
    scanned: Scanned, evidence: Evidence, cited: Mapping[str, Record]
) -> tuple[Names, frozenset[str]]:
    """Return the words of a section that may hold digits, and the years of the works that it cites."""
    works = [work for _, work in _works(scanned, cited)]
    names = Names([*evidence.names, evidence.name, *(work.title for work in works)])
    return names, frozenset(work.year for work in works)


def _works(scanned: Scanned, cited: Mapping[str, Record]) -> Iterator[tuple[int, Record]]:
    for use in scanned.uses_of(*CITING):
        for key in map(str.strip, use.arguments[0].split(",")):
            if key in cited:
                yield use.paragraph, cited[key]


def _numbers(name: str, scanned: Scanned, evidence: Evidence, cited: Mapping[str, Record]) -> list[Problem]:
    names, _ = section_names(scanned, evidence, cited)
    cites = list(_works(scanned, cited))
    faults = list(scanned.baseless)
    ungrounded: list[tuple[Finding, str]] = []
    for row in scanned.rows:
        for item, is_fault in in_formula(row):
            if is_fault:
                faults.append(item)
            else:
                ungrounded.append((item, _APART))
    for index, paragraph in enumerate(scanned.paragraphs):
        faults += adjacent(paragraph)
        years = {work.year for at, work in cites if at == index}
        ungrounded += [(item, "") for item in in_prose(paragraph, names, years)]
    return [Problem(name, fault.line, fault.text) for fault in faults] + [
        Problem(
            name,
            item.line,
            f"{item.text!r} is a number that no artifact vouches for; write \\result{{KEY}}, \\setting{{PATH}}, "
            f"\\derived{{ratio}}{{KEY}}{{KEY}} or \\citednumber{{CITATION}}{{VALUE}}, or say it without a number{hint}",
        )
        for item, hint in ungrounded
    ]
