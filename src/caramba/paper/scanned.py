"""What reading a section's LaTeX finds: its prose with marks for what commands print, its numerals, and its faults."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

HOLE = "\ufffc"
"""Replaces in prose what another command or sign prints there."""
# Noncharacters, which no section may hold; each represents a number that code prints.
VALUE = "\ufdd0"
"""A result, setting, derived or cited number."""
REFERENCE = "\ufdd1"
"""The number of a table, section or page."""
YEAR = "\ufdd2"
"""A year or the bare number of a cited work."""
AUTHOR = "\ufdd3"
"""The name of a cited work's author."""
MARKS = {
    **dict.fromkeys(("result", "resultvalue", "setting", "derived", "citednumber"), VALUE),
    **dict.fromkeys(("ref", "pageref"), REFERENCE),
    **dict.fromkeys(("citeyear", "citealt", "citealp"), YEAR),
    **dict.fromkeys(("citeauthor", "citet"), AUTHOR),
}


class NotAllowed(Exception):  # noqa: N818 - names the finding
    """The scanner cannot continue: `text` is the reason, `line` the line in the section."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.text, self.line = text, line


@dataclass(frozen=True)
class Use:
    """A command that names something: its name, its arguments as written, and its line (from 1) and paragraph."""

    command: str
    arguments: tuple[str, ...]
    line: int
    paragraph: int


@dataclass(frozen=True)
class Numeral:
    """Digits in mathematics; `is_script` in a sub- or superscript, `is_inner` below a fraction, root or display."""

    text: str
    line: int
    is_script: bool
    is_inner: bool


@dataclass(frozen=True)
class Fault:
    """Why numbers are not readable as those that code printed: `text` has the finding and the fix."""

    text: str
    line: int


@dataclass
class Scanned:
    """What a section holds. `prose` is its running text in paragraphs, with the line that each character is on; the
    letters of formulas stand in it too. `faults` are of numbers, and no matter where a person wrote them."""

    uses: list[Use] = field(default_factory=lambda: [])
    numerals: list[Numeral] = field(default_factory=lambda: [])
    paragraphs: list[list[tuple[str, int]]] = field(default_factory=lambda: [[]])
    environments: list[tuple[str, int]] = field(default_factory=lambda: [])
    faults: list[Fault] = field(default_factory=lambda: [])

    def uses_of(self, *commands: str) -> Iterable[Use]:
        """Yield the uses of some commands, in order."""
        return (use for use in self.uses if use.command in commands)

    def fault(self, text: str, line: int) -> None:
        """Take note of what is wrong with numbers on a line."""
        self.faults.append(Fault(text, line))
