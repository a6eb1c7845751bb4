"""Where numbers that code prints meet each other: two settings with a point between them are 3.3 on paper."""

from __future__ import annotations

import re
from collections.abc import Iterator

from caramba.paper.scanned import AUTHOR, REFERENCE, VALUE, YEAR, Fault

_ANY = f"{VALUE}{REFERENCE}{YEAR}"
_MEETING = re.compile(rf"[{_ANY}](?=(?P<joint>[\s.,:;'`\"eE|\u00b7]*)[{_ANY}])")
_LISTED = re.compile(r"[.,:]\s+|[\s;]*;\s+")  # ends a sentence or parts a list, as on paper
_MINUS = re.compile(
    rf"(?:^|[^\w)\]}}\ufffc{VALUE}-])[-\u2212\u2013]+\s*{VALUE}|(?<!{VALUE} )\b(?:minus|negative)\s+{VALUE}"
)
_SUFFIXED = re.compile(rf"{VALUE}(?P<suffix>[^\W\d_]+)")
_SUFFIXES = frozenset(("x", "th", "D", "B"))
_AFTER_DIGIT = re.compile(rf"[0-9][.,]?{VALUE}|{VALUE}[.,]?[0-9]")
_NUMBERED = re.compile(
    r"(?:\b(?:tables?|tabs?\.?|figures?|figs?\.?|sections?|secs?\.?|equations?|eqs?\.?|appendix|appendices|chapters?|"
    r"pages?|p\.|items?|lines?|footnotes?)|\u00a7|(?-i:\bSee)|\(see)[\s(]*$",
    re.IGNORECASE,
)
_NUMBERED_LIST = re.compile(
    rf"{REFERENCE}(?:,\s+|\)?,?\s*(?:\b(?:and|or|to|through)\b|[\u2013\u2014&-]+)\s*)\(?$"
)
_AUTHORED = re.compile(rf"(?:{AUTHOR}|\b[A-Z][^\W\d_]+|\bal\.)(?:['\u2019]s?)?,?\s*$")
_AFTER_YEAR = re.compile(r"\s*(?:$|[).,;:\]?!])")
_NEAR = 60  # characters before a mark that are looked at

VALUES_MEET = (
    "numbers that commands print stand side by side and read as one; put words or a comma and a space there"
)
NEGATED = "a minus before a value changes it; \\result and \\derived print the sign that a value has"
SUFFIX = "letters stand directly behind a value and would scale it; put a space before a unit"
TOUCHES_DIGIT = "a value touches digits and reads as one number with them; put words between them"
UNNAMED = (
    "a reference without its word reads as a number; write Table, Figure, Section, Equation or page before it, as in "
    "Table~\\ref{tab:caramba-NAME}"
)
YEAR_LOOSE = (
    "the year or number of a cited work reads as a measured one here; write it in parentheses or behind its author's "
    "name, with punctuation after it, or use \\citep or \\citet"
)


def faults(text: list[tuple[str, int]]) -> Iterator[Fault]:
    """Yield what is wrong with the places of values, references and years in a paragraph."""
    letters = "".join(letter for letter, _ in text)

    def fault(what: str, at: int) -> Fault:
        return Fault(what, text[min(at, len(text) - 1)][1])

    for found in _MEETING.finditer(letters):
        if not _LISTED.fullmatch(found["joint"]):
            yield fault(VALUES_MEET, found.start())
    for found in _MINUS.finditer(letters):
        yield fault(NEGATED, found.end() - 1)
    for found in _SUFFIXED.finditer(letters):
        if found["suffix"] not in _SUFFIXES:
            yield fault(SUFFIX, found.start())
    for found in _AFTER_DIGIT.finditer(letters):
        yield fault(TOUCHES_DIGIT, found.start())
    for at, letter in enumerate(letters):
        before = letters[max(0, at - _NEAR) : at]
        if letter == REFERENCE and not (_NUMBERED.search(before) or _NUMBERED_LIST.search(before)):
            yield fault(UNNAMED, at)
        if letter == YEAR and not (
            (_AUTHORED.search(before) or _is_in_parentheses(before)) and _AFTER_YEAR.match(letters, at + 1)
        ):
            yield fault(YEAR_LOOSE, at)


def _is_in_parentheses(before: str) -> bool:
    return before.rfind("(") > before.rfind(")")
