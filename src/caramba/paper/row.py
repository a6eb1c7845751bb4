"""One row of a formula: which of its digits a reader would see as one number, and what a script may hang on."""

from __future__ import annotations

from dataclasses import dataclass, field

from caramba.paper.scanned import Numeral, Scanned
from caramba.paper.vocabulary import FUNCTIONS, GREEK, OPERATORS, SUMS

OPENING = frozenset(("(", "[", "{", "langle", "lfloor", "lceil", "lvert", "lVert"))
CLOSING = frozenset((")", "]", "}", "rangle", "rfloor", "rceil", "rvert", "rVert"))
BARS = frozenset(("|", "vert", "Vert"))
_BETWEEN = frozenset((",", ";", ":", "cdot", "mid", "|", "ldots", "cdots", "dots"))
_GLUED = (
    "a value that a command prints and another number stand side by side and read as one; put an operator or words "
    "between them"
)
_MOST = 60  # characters of digits that a message shows


@dataclass
class Row:
    """What was read of a row so far. A script, and every cell above another, is a row of its own.

    `pending` is a number that no operator follows yet: True for one that a command prints.
    """

    found: Scanned
    is_script: bool = False
    pending: Numeral | bool = False
    is_base: bool = False
    letters: int = 0
    others: int = 0  # numerals, values and signs
    values: int = 0
    lone: Numeral | bool = False  # the script just read, where it is a number and nothing else
    _glue: str = ""
    _has_letter: bool = False
    _has_comma: bool = False
    _brackets: list[int] = field(default_factory=lambda: [])
    _since: int = 0  # where the content between bars begins

    @property
    def content(self) -> int:
        """How much it prints."""
        return self.letters + self.others

    def letter(self) -> None:
        """A letter, a Greek one or the name of a function."""
        self.letters += 1
        self.is_base, self.lone, self._has_letter = True, False, True
        self._part()

    def operator(self) -> None:
        """What separates two numbers."""
        self._print()
        self.pending = False

    def sign(self, name: str) -> None:
        """A character or a command that prints one; a bracket is one too."""
        if name in SUMS:
            self.operator()
            self.letter()
        elif name in OPERATORS:
            self.operator()
        elif name in GREEK or name in FUNCTIONS:
            self.letter()
        elif name in OPENING:
            self._print()
            self._brackets.append(self.content)
            self._since = self.content
        elif name in CLOSING:
            opened = self._brackets.pop() if self._brackets else self.content
            had = self.content > opened
            self._print()
            self.is_base = had
        elif name in BARS:
            had = self.content > self._since
            self._print()
            self._since, self.is_base = self.content, had
        else:
            self._print()
        if name in _BETWEEN:
            self._has_comma = True
            self._part()
        if name in ".,:" and self.pending:
            self._glue += name

    def space(self) -> None:
        """What prints nothing: a script has nothing to hang on."""
        self.is_base = False

    def number(self, text: str, line: int, *, is_inner: bool) -> None:
        """Digits. Those that no operator keeps from others are read together with them."""
        before = self.pending or self.lone
        if isinstance(before, Numeral):
            text = (before.text + self._glue + text)[:_MOST]
        elif before:
            self.found.fault(_GLUED, line)
        numeral = Numeral(text, line, self.is_script, is_inner)
        self.found.numerals.append(numeral)
        self._print()
        self._wait(numeral)

    def value(self, line: int) -> None:
        """A number that a command prints."""
        if self.pending or self.lone:
            self.found.fault(_GLUED, line)
        self.values += 1
        self._print()
        self._wait(True)

    def script(self, inner: Row) -> None:
        """Take note of a script that was read; the base stays, for x_1^2."""
        self.lone = inner.pending if inner.letters == 0 and inner.others == 1 else False

    def group(self, letters: int, values: int) -> None:
        """End a group in braces, with the row's state where it began: one that prints letters is a base."""
        self.is_base = self.letters > letters and self.values == values

    def end_line(self) -> None:
        """Begin the next line."""
        self.pending, self.lone, self.is_base = False, False, False
        self._brackets, self._since = [], self.content

    def cell(self) -> Row:
        """Return the row of a numerator, a denominator or the like: numbers before it stand before its own too."""
        return Row(self.found, self.is_script, self.pending, lone=self.lone)

    def take(self, cell: Row) -> None:
        """Continue after such a cell."""
        self.letters += cell.letters
        self.others += cell.others
        self.values += cell.values
        if cell.content:
            self.lone = False
        if cell.pending:
            self._wait(cell.pending)

    def _print(self) -> None:
        self.others += 1
        self.is_base, self.lone = False, False

    def _wait(self, pending: Numeral | bool) -> None:
        self.pending, self._glue, self._has_letter, self._has_comma = pending, "", False, False

    def _part(self) -> None:
        if self._has_letter and self._has_comma:
            self.pending = False
