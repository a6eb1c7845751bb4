"""The gate of a section: every number, citation, figure and reference that it holds must be one that code knows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from caramba.errors import CarambaError, nearest
from caramba.paper.evidence import Evidence
from caramba.paper.latex import NotAllowed, Scanned, Use, scan
from caramba.paper.literature import Record
from caramba.paper.numbers import Names, adjacent, in_prose

_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9:_-]*")
MOST = 12
OPERATIONS, DIRECTIONS = ("ratio", "difference", "percent_change"), ("less", "more", "equal")


@dataclass(frozen=True)
class Checked:
    """A section that was read: what it uses, and its problems with their lines, of which an accepted one has none."""

    scanned: Scanned
    problems: tuple[str, ...]


def check_section(
    name: str, body: str, evidence: Evidence, cited: Mapping[str, Record], *, numbers_are_free: bool = False
) -> Checked:
    """Check one section against the run's evidence and the works that may be cited, by their keys.

    `numbers_are_free` is for a section that a person edited: its digits are the person's own.
    """
    try:
        scanned = scan(body)
    except NotAllowed as error:
        return Checked(Scanned(), (f"{name}, line {error.line}: {error.text}",))
    problems = [(text, use.line) for use in scanned.uses for text in _wrong(use, evidence, cited)]
    if not numbers_are_free:
        names = section_names(scanned, evidence, cited)
        problems += [*scanned.wrong, *adjacent(scanned.text), *in_prose(scanned.text, names)]
    return Checked(scanned, tuple(f"{name}, line {line}: {text}" for text, line in problems))


def report(problems: Sequence[str]) -> str:
    """Return problems as text for the model or a person."""
    more = [f"… and {len(problems) - MOST} more"] if len(problems) > MOST else []
    return "\n".join([*problems[:MOST], *more])


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


def check_claim(first: str, second: str, direction: str, evidence: Evidence) -> list[str]:
    """Return why a comparison of two results does not hold, nothing where it does.

    `less` and `more` need the sign and a difference beyond 1.96 standard errors, `equal` one within them. Results
    without dispersion are exact: their sign alone decides.
    """
    if direction not in DIRECTIONS:
        hint = nearest(direction, DIRECTIONS) or ";"
        return [f"{direction!r} is no direction{hint} they are {', '.join(DIRECTIONS)}"]
    difference = derive("difference", first, second, evidence)
    one, other = evidence.result(first), evidence.result(second)
    margin = 1.96 * math.hypot(one.standard_error, other.standard_error)
    found = "equal" if abs(difference) <= margin else "less" if difference < 0 else "more"
    return [] if found == direction else [
        f"\\claim states {direction}; {first} is {one.value:g}, {second} {other.value:g}, within {margin:.3g} of each "
        f"other by chance: {found}"
    ]  # fmt: skip


def _wrong(use: Use, evidence: Evidence, cited: Mapping[str, Record]) -> list[str]:
    """Return what is wrong with a use of a command that names something."""
    first, *others = use.arguments
    known: Mapping[str, Mapping[str, object]] = {
        "setting": evidence.settings, "figure": evidence.figures, "table": evidence.tables, "citation": cited,
    }  # fmt: skip

    def unknown(kind: str, where: str, name: str = first) -> list[str]:
        hint = nearest(name, known[kind]) or f"; {where}"
        return [] if name in known[kind] else [f"{name!r} is no {kind}{hint}"]

    try:
        match use.command:
            case "result" | "resultvalue":
                evidence.result(first)
            case "derived":
                derive(first, others[0], others[1], evidence)
            case "claim":
                return check_claim(first, others[0], others[1], evidence)
            case "setting":
                return unknown("setting", "get_experiment_manifest lists them")
            case "artifactfigure" | "artifacttable":
                return unknown(use.command.removeprefix("artifact"), "list_artifacts lists them")
            case "citednumber":
                wrong = unknown("citation", "add_citation makes a key, and one work is named")
                if wrong or cited[first].states(others[0]):
                    return wrong
                return [f"{others[0]!r} does not stand in the abstract of {first}; quote a number that does"]
            case "label" if not _LABEL.fullmatch(first):
                return [f"label {first!r}: expected letters, digits, : - and _, such as sec:setup"]
            case command if command.startswith("cite"):
                keys = map(str.strip, first.split(","))
                return [text for key in keys for text in unknown("citation", "add_citation makes a key", key)]
            case _:
                pass
    except CarambaError as error:
        return [str(error)]
    return []


def section_names(scanned: Scanned, evidence: Evidence, cited: Mapping[str, Record]) -> Names:
    """Return the words of a section that may hold digits: of the manifest, and of titles of works that it cites."""
    titles = [cited[key].title for key in scanned.citation_keys() if key in cited]
    return Names([*evidence.names, evidence.name, *titles])
