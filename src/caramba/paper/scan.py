"""Reads the LaTeX of a section: which names it uses, its prose and its mathematics, and what it may not contain."""

from __future__ import annotations

import unicodedata

from caramba.config.names import nearest
from caramba.paper.row import Row
from caramba.paper.scanned import HOLE, MARKS, VALUE, NotAllowed, Scanned, Use
from caramba.paper.source import Source
from caramba.paper.vocabulary import (
    DELIMITED,
    DELIMITERS,
    INNER_MATH_ENVIRONMENTS,
    LIMITS,
    MATH_COMMANDS,
    MATH_ENVIRONMENTS,
    PROSE_COMMANDS,
    PROSE_ENVIRONMENTS,
    SPACES,
    UNPRINTED,
)

_BREAK = " ; "  # between cells and items, which are separate on the page
# What commands of prose print, where it is a part of a word or joins or parts words.
_PRINTED = {
    **dict.fromkeys(("quad", "qquad", "par", "newline", "\\", " ", ",", ";", ":"), " "),
    **{sign: sign for sign in "%&$#_{}"},
    **{
        "i": "i",
        "j": "j",
        "l": "l",
        "L": "L",
        "o": "o",
        "O": "O",
        "S": "\u00a7",
        "P": "\u00b6",
        "ldots": "\u2026",
    },
    **{"dots": "\u2026", "textendash": "\u2013", "textemdash": "\u2014", "textmu": "\u00b5", "item": _BREAK},
}
_MATH_PRINTED = {"times": "\u00d7", "cdot": "\u00b7", "bullet": "\u00b7", "prime": "'"}
_DEEPEST = 60  # groups, which also bounds how deep the reader calls itself
_CELLS = frozenset(("frac", "tfrac", "dfrac", "binom", "sqrt"))
_APART = frozenset(("footnote", "caption", "paragraph", "subsection", "subsubsection", "artifactfigure"))
_TEXTS = frozenset(("text", "textrm", "textit", "textbf", "texttt"))


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
            if category[0] == "L" and unicodedata.decomposition(letter).startswith("<"):
                plain = unicodedata.normalize("NFKC", letter)
                raise NotAllowed(f"{letter!r} is a joined or styled letter; write {plain!r}", line)
        if "^^" in text:
            raise NotAllowed("^^ is not allowed; write the character itself", line)
        if "caramba:" in text.partition("%")[2]:
            raise NotAllowed("comments that begin with caramba: mark sections and are written by code", line)
    reader = _Reader(source)
    reader.prose(None)
    return reader.found


class _Reader(Source):
    """One pass over the source. `until` of a method is what ends it: a closing brace, a bracket or `end:NAME`."""

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.found = Scanned()
        self.row: Row | None = None  # of the formula that is being read
        self.tables = 0  # that are open
        self.depth = 0

    def prose(self, until: str | None) -> None:
        """Read running text."""
        self._deeper(1)
        self._prose(until)
        self._deeper(-1)

    def math(self, until: str, row: Row, *, is_inner: bool) -> None:
        """Read mathematics into a row."""
        self._deeper(1)
        self._math(until, row, is_inner=is_inner)
        self._deeper(-1)

    def _deeper(self, by: int) -> None:
        self.depth += by
        if self.depth > _DEEPEST:
            raise NotAllowed(f"more than {_DEEPEST} groups within each other; close some", self.line)

    def _prose(self, until: str | None) -> None:
        opened = self.line
        while (letter := self.next()) is not None:
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
                if self.peek() == "$":
                    raise NotAllowed("$$ is not allowed; use the environment equation", self.line)
                self._formula("$", is_inner=False)
            elif letter in "^_#":
                raise NotAllowed(rf"{letter} outside of mathematics; write \{letter} for the sign", self.line)
            elif letter == "&":
                if until != "end:tabular":
                    raise NotAllowed(r"& outside of a table; write \& for the sign", self.line)
                self._put(_BREAK)
            elif letter == "\n" and self.blank_line_follows():
                self.found.paragraphs.append([])
            else:
                self._put(" " if letter in "~\n\t" else letter)
                if self.row is not None and letter.isalpha():
                    self.row.letter()
        if until is not None:
            raise NotAllowed(f"{_shown(until)} is missing for what opened on line {opened}", self.line)

    def _formula(self, until: str, *, is_inner: bool) -> None:
        """Read mathematics that begins here: a row of its own, or a part of one if it is in its \text."""
        before, self.row = self.row, self.row or Row(self.found)
        self.math(until, self.row, is_inner=is_inner)
        self.row = before

    def _math(self, until: str, row: Row, *, is_inner: bool) -> None:
        opened = self.line
        while (letter := self.next()) is not None:
            if letter == until:
                return
            if letter == "\\":
                if self.raw() == until[1:2] and until in ("\\)", "\\]"):
                    self.at += 1
                    return
                if self._command(MATH_COMMANDS, until, is_inner=is_inner):
                    return
            elif letter in "^_":
                self._script(row)
            elif letter == "{":
                held = row.letters, row.values
                self.math("}", row, is_inner=is_inner)
                row.group(*held)
            elif letter in "}$#":
                raise NotAllowed(f"{letter} where {_shown(until)} was expected", self.line)
            elif letter.isnumeric():
                self._numeral(letter, row, is_inner)
            elif letter.isalpha():
                row.letter()
                self._put(letter)
            elif letter == "&":
                self._put(_BREAK)
            elif not letter.isspace() and letter not in "'~":
                row.sign(letter)
                self._put(letter)
        raise NotAllowed(f"{_shown(until)} is missing for what opened on line {opened}", self.line)

    def _script(self, row: Row) -> None:
        if not row.is_base:
            self.found.fault(
                "a sub- or superscript needs a letter or a bracket before it; digits, values and empty groups are no "
                "base for one",
                self.line,
            )
        while self.peek().isspace():
            self.next()
        inner = Row(self.found, is_script=True)
        self._put(HOLE)
        self.row = inner
        letter = self.next()
        if letter == "{":
            self.math("}", inner, is_inner=False)
        elif letter == "\\":
            self._command(MATH_COMMANDS, "", is_inner=False)
        elif letter is not None and letter.isnumeric():
            inner.number(letter, self.line, is_inner=False)  # TeX takes one digit alone
        elif letter is not None and letter.isalpha():
            inner.letter()
            self._put(letter)
        elif letter is not None:
            inner.sign(letter)
        self.row = row
        if inner.content:
            self._put(HOLE)
        elif self.found.paragraphs[-1][-1][0] == HOLE:
            self.found.paragraphs[-1].pop()  # an empty script parts no word
        row.script(inner)

    def _numeral(self, first: str, row: Row, is_inner: bool) -> None:
        text, line = first, self.line
        while self.peek() and (self.peek().isnumeric() or self.peek() in ".,"):
            text += self.next() or ""
        number = text.rstrip(".,")
        row.number(number, line, is_inner=is_inner)
        for sign in text[len(number) :]:
            row.sign(sign)
        self._put(HOLE)

    def _sign(self, name: str, row: Row) -> None:
        """Take a command of mathematics without arguments."""
        if name in SPACES:
            row.space()
            self._put(" ")
        elif name in UNPRINTED:
            row.space()
        elif name == "\\":
            row.end_line()
            self._put(" ")
        elif name in DELIMITED:
            while self.peek().isspace():
                self.next()
            bracket = self.next() or ""
            is_command = bracket == "\\"
            bracket = self.name() if is_command else bracket
            if not (bracket in DELIMITERS or (is_command and bracket in ("{", "}", "|"))):
                raise NotAllowed(rf"\{name} expects a bracket, or . for none", self.line)
            if bracket == ".":
                row.space()
            else:
                row.sign(bracket)
                self._put(HOLE)
        elif name not in LIMITS:
            row.sign(name)
            self._put(_MATH_PRINTED.get(name, HOLE))

    def _command(self, allowed: dict[str, str], until: str | None, *, is_inner: bool = False) -> bool:
        """Read a command after its backslash; True when it ends the environment that `until` names."""
        name, line = self.name(), self.line
        in_math = allowed is MATH_COMMANDS
        if name in ("begin", "end"):
            return self._environment(name, until, in_math)
        if not in_math and name in ("(", "["):
            self._formula("\\)" if name == "(" else "\\]", is_inner=name == "[")
            return False
        if name not in allowed:
            hint = nearest(name, allowed) if len(name) > 2 else None
            raise NotAllowed(
                rf"\{name} is not a command that a section may use{' in mathematics' if in_math else ''}"
                f"{hint or '; get_paper_template lists them'}",
                line,
            )
        if in_math and self.row is not None and not allowed[name]:
            self._sign(name, self.row)
        elif not in_math:
            self._put(_BREAK if name == "\\" and self.tables else _PRINTED.get(name, ""))
        self._arguments(name, allowed[name], line, in_math, is_inner)
        return False

    def _arguments(self, name: str, kinds: str, line: int, in_math: bool, is_inner: bool) -> None:
        names: list[str] = []
        optional = False
        start = self.row.cell() if self.row is not None and name in _CELLS else None
        for kind in kinds:
            if kind == "?":
                optional = True
                continue
            while self.peek().isspace() and not optional:
                self.next()
            if optional and self.peek() != "[":
                optional = False
                continue
            opening, closing = ("[", "]") if optional else ("{", "}")
            optional = False
            if self.next() != opening:
                raise NotAllowed(rf"\{name} expects {opening} here", line)
            if kind in "pm" and in_math and self.row is not None:
                self._part(name, closing, self.row, start, is_inner)
            elif kind == "p" and name in _APART:
                self._put(_BREAK)
                self.prose(closing)
                self._put(_BREAK)
            elif kind == "p":
                self.prose(closing)
            else:
                names.append(self.verbatim(name, line))
        if names:
            self.found.uses.append(Use(name, tuple(names), line, len(self.found.paragraphs) - 1))
            if name != "label":
                self._put(MARKS.get(name, HOLE))
            if self.row is not None and MARKS.get(name) == VALUE:
                self.row.value(line)

    def _part(self, name: str, closing: str, row: Row, start: Row | None, is_inner: bool) -> None:
        r"""Read an argument in mathematics: of a font or an accent, of \text, or one above or below another, which
        follows what is before both (`start`)."""
        held = row.letters, row.values
        if name in _TEXTS:
            self.prose(closing)
        elif start is not None:
            cell = self.row = start.cell()
            self._put(HOLE)
            self.math(closing, cell, is_inner=is_inner or name != "binom")
            self._put(HOLE)
            self.row = row
            row.take(cell)
        else:
            self.math(closing, row, is_inner=is_inner)
        row.group(*held)

    def _environment(self, name: str, until: str | None, in_math: bool) -> bool:
        line = self.line
        if self.next() != "{":
            raise NotAllowed(rf"\{name} expects a brace here", line)
        environment = self.verbatim(name, line)
        if name == "end":
            if until != f"end:{environment}":
                raise NotAllowed(
                    rf"\end{{{environment}}} where {_shown(until or 'no end')} was expected", line
                )
            return True
        self.found.environments.append((environment, line))
        end = f"end:{environment}"
        if environment in (INNER_MATH_ENVIRONMENTS if in_math else MATH_ENVIRONMENTS):
            if in_math and self.row is not None:
                row, cell = self.row, self.row.cell()
                self.row = cell
                self.math(end, cell, is_inner=True)
                self.row = row
                row.take(cell)
            else:
                self._formula(end, is_inner=True)
        elif not in_math and environment in PROSE_ENVIRONMENTS:
            if PROSE_ENVIRONMENTS[environment]:
                columns = self.verbatim("begin{tabular}", line) if self.next() == "{" else ""
                if not columns or set(columns) - set("lcr|"):
                    raise NotAllowed(
                        f"columns of a tabular are letters of l, c, r and |, got {columns!r}", line
                    )
            is_table = environment == "tabular"
            self._put(" " if is_table else _BREAK)  # a table may be next to what is before it
            self.tables += is_table
            self.prose(end)
            self.tables -= is_table
            self._put(" " if is_table else _BREAK)
        else:
            known = (*PROSE_ENVIRONMENTS, *sorted(MATH_ENVIRONMENTS))
            raise NotAllowed(
                f"environment {environment!r} is not one that a section may use"
                f"{nearest(environment, known) or '; they are ' + ', '.join(known)}",
                line,
            )
        return False

    def _put(self, text: str) -> None:
        self.found.paragraphs[-1].extend((letter, self.line) for letter in text)


def _shown(until: str) -> str:
    return rf"\end{{{until[4:]}}}" if until.startswith("end:") else until
