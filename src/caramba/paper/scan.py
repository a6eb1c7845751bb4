"""Reads the LaTeX of a section: which names it uses, its prose and its mathematics, and what it may not contain."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field

from caramba.config.names import nearest
from caramba.paper.vocabulary import (
    INNER_MATH_ENVIRONMENTS,
    MATH_COMMANDS,
    MATH_ENVIRONMENTS,
    PROSE_COMMANDS,
    PROSE_ENVIRONMENTS,
)

# What prints nothing that would keep two digits apart.
_JOINS = re.compile(
    r"(?:[\s{}]|\\[,;:! /]|\\(?:quad|qquad|mathrm|mathbf|mathit|text|textrm|textbf|textit)(?![A-Za-z]))*"
)
_BASES = frozenset(")]}|'")

HOLE = "\ufffc"
"""Stands in prose for what another command prints there."""


class NotAllowed(Exception):  # noqa: N818 - says what was found
    """The scanner cannot read on: `text` says why, `line` where in the section."""

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


@dataclass
class Scanned:
    """What a section holds. `prose` is its running text in paragraphs, with the line that each character is on."""

    uses: list[Use] = field(default_factory=lambda: [])
    numerals: list[Numeral] = field(default_factory=lambda: [])
    paragraphs: list[list[tuple[str, int]]] = field(default_factory=lambda: [[]])
    environments: list[tuple[str, int]] = field(default_factory=lambda: [])

    def named(self, *commands: str) -> Iterable[Use]:
        """Yield the uses of some commands, in order."""
        return (use for use in self.uses if use.command in commands)


def scan(source: str) -> Scanned:
    """Read a section's body.

    Raises:
        NotAllowed: a character, command or environment that is not on the list, or braces that do not match.
    """
    for line, text in enumerate(source.split("\n"), 1):
        for letter in text:
            category = unicodedata.category(letter)
            if (category in ("Cc", "Cf", "Co", "Cs", "Cn") and letter != "\t") or letter == HOLE:
                raise NotAllowed(f"character U+{ord(letter):04X} is not allowed; write plain text", line)
        if "^^" in text:
            raise NotAllowed("^^ is not allowed; write the character itself", line)
        if "caramba:" in text.partition("%")[2]:
            raise NotAllowed("comments that begin with caramba: mark sections and are written by code", line)
    reader = _Reader(source)
    reader.prose(None)
    return reader.found


class _Reader:
    """One pass over the source. `until` of a method is what ends it: a closing brace, a bracket or `end:NAME`."""

    def __init__(self, source: str) -> None:
        self.source, self.at, self.line, self.found = source, 0, 1, Scanned()
        self.numeral_end: int | None = None  # of the last digits in mathematics, within one argument

    def prose(self, until: str | None) -> None:
        opened = self.line
        while (letter := self._next()) is not None:
            if letter == until:
                return
            if letter == "\\":
                if self._command(PROSE_COMMANDS, until):
                    return
            elif letter == "{":
                self.prose("}")
            elif letter == "}":
                raise NotAllowed("a closing brace without an opening one", self.line)
            elif letter == "$":
                if self._peek() == "$":
                    raise NotAllowed("$$ is not allowed; use the environment equation", self.line)
                self._put(HOLE)
                self.math("$", is_inner=False)
            elif letter in "^_#":
                raise NotAllowed(rf"{letter} outside of mathematics; write \{letter} for the sign", self.line)
            elif letter == "&":
                if until != "end:tabular":
                    raise NotAllowed(r"& outside of a table; write \& for the sign", self.line)
                self._put(" ")
            elif letter == "\n" and self._blank_line_follows():
                self.found.paragraphs.append([])
            else:
                self._put(" " if letter in "~\n\t" else letter)
        if until is not None:
            raise NotAllowed(f"{_shown(until)} is missing for what opened on line {opened}", self.line)

    def math(self, until: str, *, is_inner: bool, is_script: bool = False) -> None:
        opened = self.line
        while (letter := self._next()) is not None:
            if letter == until:
                return
            if letter == "\\":
                if self._raw() == until[1:2] and until in ("\\)", "\\]"):
                    self.at += 1
                    return
                if self._command(MATH_COMMANDS, until, is_script=is_script):
                    return
            elif letter in "^_":
                self._script()
            elif letter == "{":
                self.math("}", is_inner=is_inner, is_script=is_script)
            elif letter in "}$#":
                raise NotAllowed(f"{letter} where {_shown(until)} was expected", self.line)
            elif letter.isnumeric():
                self._numeral(letter, is_script, is_inner)
        raise NotAllowed(f"{_shown(until)} is missing for what opened on line {opened}", self.line)

    def _script(self) -> None:
        base = self.source[: self.at - 1].rstrip()
        if not base or base.endswith("{}") or not (base[-1].isalpha() or base[-1] in _BASES):
            raise NotAllowed("a sub- or superscript needs a letter or a bracket before it", self.line)
        while self._peek().isspace():
            self._next()
        letter = self._next()
        if letter == "{":
            self.math("}", is_inner=False, is_script=True)
        elif letter == "\\":
            self._command(MATH_COMMANDS, "", is_script=True)
        elif letter is not None and letter.isnumeric():
            self._add_numeral(letter, self.at - 1, True, False)  # TeX takes one digit alone

    def _numeral(self, first: str, is_script: bool, is_inner: bool) -> None:
        text, start = first, self.at - 1
        while self._peek() and (self._peek().isnumeric() or self._peek() in ".,"):
            text += self._next() or ""
        self._add_numeral(text.rstrip(".,"), start, is_script, is_inner)

    def _add_numeral(self, text: str, start: int, is_script: bool, is_inner: bool) -> None:
        """Keep digits, together with those before them where a reader would see one number."""
        if self.numeral_end is not None and _JOINS.fullmatch(self.source, self.numeral_end, start):
            text = self.found.numerals.pop().text + text
        self.found.numerals.append(Numeral(text, self.line, is_script, is_inner))
        self.numeral_end = self.at

    def _command(self, allowed: dict[str, str], until: str | None, *, is_script: bool = False) -> bool:
        """Read a command after its backslash; True when it ends the environment that `until` names."""
        name, line = self._name(), self.line
        in_math = allowed is MATH_COMMANDS
        if name in ("begin", "end"):
            return self._environment(name, until, in_math)
        if not in_math and name in "([" and name:
            self._put(HOLE)
            self.math("\\)" if name == "(" else "\\]", is_inner=name == "[")
            return False
        if name not in allowed:
            hint = nearest(name, allowed) if len(name) > 2 else None
            raise NotAllowed(
                rf"\{name} is not a command that a section may use{' in mathematics' if in_math else ''}"
                f"{hint or '; get_paper_template lists them'}",
                line,
            )
        if not in_math and name in ("quad", "qquad", "par", "newline", "\\", " ", "item"):
            self._put(" ")
        elif not in_math and name in "%&$#_{}" and len(name) == 1:
            self._put(name)
        self._arguments(name, allowed[name], line, is_script)
        return False

    def _arguments(self, name: str, kinds: str, line: int, is_script: bool) -> None:
        names: list[str] = []
        optional = False
        for kind in kinds:
            if kind == "?":
                optional = True
                continue
            while self._peek().isspace() and not optional:
                self._next()
            if optional and self._peek() != "[":
                optional = False
                continue
            opening, closing = ("[", "]") if optional else ("{", "}")
            optional = False
            if self._next() != opening:
                raise NotAllowed(rf"\{name} expects {opening} here", line)
            if kind == "p":
                self.prose(closing)
            elif kind == "m":
                self.numeral_end = None
                self.math(closing, is_inner=name in ("frac", "tfrac", "dfrac", "sqrt"), is_script=is_script)
            else:
                names.append(self._verbatim(name, line))
                if kind in "rsofvc":
                    self._put(HOLE)
        if names:
            self.found.uses.append(Use(name, tuple(names), line, len(self.found.paragraphs) - 1))

    def _environment(self, name: str, until: str | None, in_math: bool) -> bool:
        line = self.line
        if self._next() != "{":
            raise NotAllowed(rf"\{name} expects a brace here", line)
        environment = self._verbatim(name, line)
        if name == "end":
            if until != f"end:{environment}":
                raise NotAllowed(
                    rf"\end{{{environment}}} where {_shown(until or 'no end')} was expected", line
                )
            return True
        self.found.environments.append((environment, line))
        end = f"end:{environment}"
        if environment in (INNER_MATH_ENVIRONMENTS if in_math else MATH_ENVIRONMENTS):
            self._put(HOLE if not in_math else "")
            self.math(end, is_inner=True)
        elif not in_math and environment in PROSE_ENVIRONMENTS:
            if PROSE_ENVIRONMENTS[environment]:
                columns = self._verbatim("begin{tabular}", line) if self._next() == "{" else ""
                if not columns or set(columns) - set("lcr|"):
                    raise NotAllowed(
                        f"columns of a tabular are letters of l, c, r and |, got {columns!r}", line
                    )
            self.prose(end)
        else:
            known = (*PROSE_ENVIRONMENTS, *sorted(MATH_ENVIRONMENTS))
            raise NotAllowed(
                f"environment {environment!r} is not one that a section may use"
                f"{nearest(environment, known) or '; they are ' + ', '.join(known)}",
                line,
            )
        return False

    def _name(self) -> str:
        """Read the name behind a backslash, where % begins no comment and ends a name."""
        letter = self._raw()
        if not letter:
            raise NotAllowed("a backslash at the end", self.line)
        self.at += 1
        if not (letter.isascii() and letter.isalpha()):
            self.line += letter == "\n"
            return " " if letter.isspace() else letter
        name = letter
        while self._raw().isascii() and self._raw().isalpha():
            name += self._raw()
            self.at += 1
        return name + (self._next() or "") if name == "operatorname" and self._peek() == "*" else name

    def _verbatim(self, command: str, line: int) -> str:
        """Read a name up to its closing brace: names hold no braces, backslashes or comments."""
        end = self.source.find("}", self.at)
        text = self.source[self.at : end] if end >= 0 else ""
        if end < 0 or any(sign in text for sign in "{\\%\n$~#"):
            raise NotAllowed(rf"\{command} expects a plain name in braces, got {text[:40]!r}", line)
        self.at = end + 1
        return text.strip()

    def _put(self, text: str) -> None:
        self.found.paragraphs[-1].extend((letter, self.line) for letter in text)

    def _raw(self) -> str:
        return self.source[self.at : self.at + 1]

    def _peek(self) -> str:
        """Return the letter that TeX reads next, behind comments; not for what follows a backslash: \\% prints."""
        while self._raw() == "%":
            end = self.source.find("\n", self.at)
            self.line += 1
            self.at = len(self.source) if end < 0 else end + 1
        return self._raw()

    def _blank_line_follows(self) -> bool:
        return not self.source[self.at :].partition("\n")[0].strip()

    def _next(self) -> str | None:
        letter = self._peek() or None
        self.at += 1
        if letter == "\n":
            self.line += 1
        return letter


def _shown(until: str) -> str:
    return rf"\end{{{until[4:]}}}" if until.startswith("end:") else until
