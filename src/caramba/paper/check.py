"""The gate of a section: every number, citation, figure and reference that it holds must be one that code knows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from caramba.errors import CarambaError, nearest
from caramba.paper.evidence import Evidence
from caramba.paper.latex import NotAllowed, Scanned, Use, scan
from caramba.paper.numbers import Names, adjacent, as_prose, in_formulas, in_prose
from caramba.paper.records import Record
from caramba.paper.vocabulary import DIRECTIONS, OPERATIONS

CITING = ("cite", "citep", "citet", "citealt", "citealp", "citeauthor", "citeyear")
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9:_-]*")
MOST = 12
UNGROUNDED = (
    "is a number that no artifact vouches for; write \\result{KEY}, \\setting{PATH}, \\derived{ratio}{KEY}{KEY}, "
    "\\citednumber{CITATION}{VALUE} or \\citeyear{CITATION}, or use words"
)


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


def check_claim(first: str, second: str, direction: str, evidence: Evidence) -> str | None:
    """Return why a comparison of two results does not hold, None where it does.

    `less` and `more` need the sign and a difference beyond 1.96 standard errors, `equal` one within them. Results
    without dispersion are exact: their sign alone decides.
    """
    if direction not in DIRECTIONS:
        return f"{direction!r} is no direction{nearest(direction, DIRECTIONS) or ';'} they are {', '.join(DIRECTIONS)}"
    difference = derive("difference", first, second, evidence)
    margin = 1.96 * math.hypot(*(evidence.result(key).standard_error for key in (first, second)))
    found = "equal" if abs(difference) <= margin else "less" if difference < 0 else "more"
    if found == direction:
        return None
    return (
        f"\\claim states {direction}; {first} is {evidence.result(first).value:g}, {second} "
        f"{evidence.result(second).value:g}, within {margin:.3g} of each other by chance: {found}"
    )


def _wrong(use: Use, evidence: Evidence, cited: Mapping[str, Record]) -> list[str]:
    command, arguments = use.command, use.arguments
    known = {"setting": (evidence.settings, "get_experiment_manifest lists them"),
             "artifactfigure": (evidence.figures, "list_artifacts lists them"),
             "artifacttable": (evidence.tables, "list_artifacts lists them")}  # fmt: skip
    try:
        if command in ("result", "resultvalue"):
            evidence.result(arguments[0])
        elif command == "derived":
            derive(arguments[0], arguments[1], arguments[2], evidence)
        elif command == "claim":
            wrong = check_claim(arguments[0], arguments[1], arguments[2], evidence)
            return [wrong] if wrong else []
    except CarambaError as error:
        return [str(error)]
    if command in known:
        return _unknown(arguments[0], known[command][0], command.removeprefix("artifact"), known[command][1])
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


def section_names(scanned: Scanned, evidence: Evidence, cited: Mapping[str, Record]) -> Names:
    """Return the words of a section that may hold digits: of the manifest, and of titles of works that it cites."""
    keys = [key.strip() for use in scanned.uses_of(*CITING) for key in use.arguments[0].split(",")]
    return Names([*evidence.names, evidence.name, *(cited[key].title for key in keys if key in cited)])


def _numbers(name: str, scanned: Scanned, evidence: Evidence, cited: Mapping[str, Record]) -> list[Problem]:
    names = section_names(scanned, evidence, cited)
    found = [item for part in scanned.paragraphs for item in in_formulas(part)]
    for part in map(as_prose, scanned.paragraphs):
        found += [(text, line, False) for text, line in adjacent(part)]
        found += [(text, line, True) for text, line in in_prose(part, names)]
    return [
        Problem(name, line, f"{text!r} {UNGROUNDED}" if is_number else text)
        for text, line, is_number in found
    ]
