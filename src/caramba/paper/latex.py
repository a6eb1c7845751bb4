"""Reads the LaTeX of a section by pylatexenc: the names that it uses, its prose, its formulas, what it may not hold."""

from __future__ import annotations

import bisect
import functools
import importlib
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from caramba.config.optional_deps import need_library
from caramba.errors import nearest
from caramba.paper import vocabulary as words

HOLE = "\ufffc"
"""Replaces in prose what another command or sign prints there."""
# Noncharacters, which no section may hold; each represents a number that code prints.
VALUE, REFERENCE, YEAR, AUTHOR = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_MARKS = {
    **dict.fromkeys(("result", "resultvalue", "setting", "derived", "citednumber"), VALUE),
    **dict.fromkeys(("ref", "pageref"), REFERENCE),
    **dict.fromkeys(("citeyear", "citealt", "citealp"), YEAR),
    **dict.fromkeys(("citeauthor", "citet"), AUTHOR),
}
_BREAK = " ; "  # between cells and items, which are separate on the page
_DEEPEST = 60  # groups within each other
_CELLS = frozenset(("frac", "tfrac", "dfrac", "binom", "sqrt"))
_APART = frozenset(("footnote", "caption", "paragraph", "subsection", "subsubsection", "artifactfigure"))
_KNOWN = frozenset((*words.PROSE_COMMANDS, *words.MATH_COMMANDS, "(", ")", "[", "]"))
_TOKEN = re.compile(r"\\([A-Za-z]+|.|$)|%[^\n]*|[{}]", re.DOTALL)
_ENVIRONMENT = re.compile(r"\s*\{([^{}]*)\}")
_BLANK_LINE = re.compile(r"\n[ \t]*\n")
_BASE = re.compile(r"(?:l|\^|[^( \n]\)|[lc)]\||\|[^|]*l[^|]*[\^nvc]\|)\Z")
_BASELESS = (
    "a sub- or superscript needs a letter or a bracket before it; digits, values and empty groups are no "
    "base for one"
)


class NotAllowed(Exception):  # noqa: N818 - names the finding
    """The section cannot be read: `text` is the reason, `line` the line in the section."""

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
class Finding:
    """Something about a number, and the line that it is on."""

    text: str
    line: int


@dataclass(frozen=True)
class Token:
    """One sign of a formula. `kind`: n digits, v a value, c a fraction or matrix with numbers, l letter, o operator,
    s another sign, ( ) | brackets, ^ a script (`text`: its number where it is nothing else), a space or a line's end.
    """

    kind: str
    text: str
    line: int


@dataclass
class FormulaRow:
    """A row of a formula; a script and what is above or below another are rows of their own."""

    is_script: bool
    is_inner: bool
    tokens: list[Token] = field(default_factory=lambda: [])

    @property
    def kinds(self) -> str:
        return "".join(token.kind for token in self.tokens)


@dataclass
class Scanned:
    """What a section holds. `paragraphs` are its running text, each character with its line; the letters of formulas
    are in it too. `baseless` are of numbers, and no matter where a person wrote them."""

    uses: list[Use] = field(default_factory=lambda: [])
    paragraphs: list[list[tuple[str, int]]] = field(default_factory=lambda: [[]])
    rows: list[FormulaRow] = field(default_factory=lambda: [])
    baseless: list[Finding] = field(default_factory=lambda: [])

    def uses_of(self, *commands: str) -> Iterable[Use]:
        """Yield the uses of some commands, in order."""
        return (use for use in self.uses if use.command in commands)


def scan(source: str) -> Scanned:
    """Read a section's body.

    Raises:
        NotAllowed: a character, command or environment that is not on the list, or braces that do not match.
    """
    _check_characters(source)
    _check_commands(source)
    tex, grammar = _parser()
    reader = _Reader(source, tex)
    try:
        nodes = tex.LatexWalker(source, latex_context=grammar, tolerant_parsing=False).get_latex_nodes()[0]
        reader.prose(nodes)
    except tex.LatexWalkerParseError as error:
        raise NotAllowed(_syntax(error), error.lineno or 1) from None
    except RecursionError:
        raise NotAllowed(f"more than {_DEEPEST} groups within each other; close some", 1) from None
    return reader.found


def _check_characters(source: str) -> None:
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


def _check_commands(source: str) -> None:
    """Refuse commands, environments and depth on the raw text, before anything is parsed."""
    depth = 0
    for found in _TOKEN.finditer(source):
        line = source.count("\n", 0, found.start()) + 1 if found[0][0] == "\\" else 0
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth > _DEEPEST:
            line = source.count("\n", 0, found.start()) + 1
            raise NotAllowed(f"more than {_DEEPEST} groups within each other; close some", line)
        name = found[1]
        if name == "":
            raise NotAllowed("a backslash at the end", line)
        if name in ("begin", "end"):
            environment = _ENVIRONMENT.match(source, found.end())
            if environment is None:
                raise NotAllowed(rf"\{name} expects a brace here", line)
            if environment[1] not in (
                *words.PROSE_ENVIRONMENTS,
                *words.MATH_ENVIRONMENTS,
                *words.INNER_MATH_ENVIRONMENTS,
            ):
                raise _unknown_environment(environment[1], line)
        elif name is not None and _plain(name) not in _KNOWN:
            raise _unknown_command(name, line, words.PROSE_COMMANDS)


def _unknown_command(name: str, line: int, allowed: dict[str, str]) -> NotAllowed:
    hint = nearest(name, allowed) if len(name) > 2 else None
    where = " in mathematics" if allowed is words.MATH_COMMANDS else ""
    return NotAllowed(
        rf"\{name} is not a command that a section may use{where}{hint or '; get_paper_template lists them'}",
        line,
    )


def _unknown_environment(name: str, line: int) -> NotAllowed:
    known = (*words.PROSE_ENVIRONMENTS, *sorted(words.MATH_ENVIRONMENTS))
    return NotAllowed(
        f"environment {name!r} is not one that a section may use"
        f"{nearest(name, known) or '; they are ' + ', '.join(known)}",
        line,
    )


def _plain(name: str) -> str:
    return " " if name.isspace() else name


def _syntax(error: Any) -> str:
    expected = re.search(r"was expecting (.+)", error.msg)
    if expected:
        opened = [line for _, _, line, _ in error.open_contexts if line is not None]
        where = f" for what opened on line {opened[-1]}" if opened else ""
        return f"{expected[1].strip(chr(39))} is missing{where}"
    if "closing brace" in error.msg:
        return "a closing brace without an opening one"
    return f"{error.msg}; close what is open in the order in which it was opened"


@functools.cache
def _parser() -> tuple[Any, Any]:
    """Return pylatexenc's walker and the commands and environments that it shall know."""
    need_library("pylatexenc", "paper", "paper")
    tex: Any = importlib.import_module("pylatexenc.latexwalker")
    spec: Any = importlib.import_module("pylatexenc.macrospec")
    kinds = {**words.PROSE_COMMANDS, **words.MATH_COMMANDS}
    macros = [
        spec.MacroSpec(name, re.sub(r"\w", "{", re.sub(r"\?\w", "[", kind))) for name, kind in kinds.items()
    ]
    environments = [
        spec.EnvironmentSpec(name, "{" if kind else "") for name, kind in words.PROSE_ENVIRONMENTS.items()
    ]
    environments += [
        spec.EnvironmentSpec(name, is_math_mode=True)
        for name in (*words.MATH_ENVIRONMENTS, *words.INNER_MATH_ENVIRONMENTS)
    ]
    grammar = spec.LatexContextDb()
    starred = spec.MacroSpec("operatorname", "*{")
    grammar.add_context_category("section", macros=[*macros, starred], environments=environments)
    return tex, grammar


class _Reader:
    """Walks the nodes of a section and takes down what it prints."""

    def __init__(self, source: str, tex: Any) -> None:
        self.source, self.tex, self.found = source, tex, Scanned()
        self.tables = 0  # that are open
        self._ends = [at for at, letter in enumerate(source) if letter == "\n"]
        self._line = 1

    def _at(self, at: int) -> int:
        """Return the line of a place, and keep it for what is printed next."""
        self._line = bisect.bisect_left(self._ends, at) + 1
        return self._line

    def _put(self, text: str) -> None:
        self.found.paragraphs[-1].extend((letter, self._line) for letter in text)

    def _items(self, nodes: Iterable[Any]) -> Iterator[Any]:
        """Yield nodes, and characters with their places; no comments."""
        for node in nodes:
            if isinstance(node, self.tex.LatexCharsNode):
                yield from ((letter, node.pos + index) for index, letter in enumerate(node.chars))
            elif not isinstance(node, self.tex.LatexCommentNode):
                yield node

    def prose(self, nodes: list[Any], row: FormulaRow | None = None, *, in_table: bool = False) -> None:
        """Read running text; `row` is the formula that it is in."""
        for item in self._items(nodes):
            if isinstance(item, tuple):
                self._letter(item[0], item[1], row, in_table=in_table)
                continue
            self._at(item.pos)
            if isinstance(item, self.tex.LatexGroupNode):
                self.prose(item.nodelist, row)
            elif isinstance(item, self.tex.LatexMathNode):
                is_empty = all(isinstance(part, self.tex.LatexCommentNode) for part in item.nodelist)
                if item.delimiters[0] == "$$" or (item.delimiters[0] == "$" and is_empty):
                    raise NotAllowed("$$ is not allowed; use the environment equation", self._line)
                self._formula(item.nodelist, row, is_inner=item.displaytype == "display")
            elif isinstance(item, self.tex.LatexEnvironmentNode):
                self._environment(item, row)
            else:
                self._command(item, words.PROSE_COMMANDS, row, is_inner=False)

    def _letter(self, letter: str, at: int, row: FormulaRow | None, *, in_table: bool) -> None:
        line = self._at(at)
        if letter in "^_#":
            raise NotAllowed(rf"{letter} outside of mathematics; write \{letter} for the sign", line)
        if letter == "&" and not in_table:
            raise NotAllowed(r"& outside of a table; write \& for the sign", line)
        if letter == "\n" and _BLANK_LINE.match(self.source, at):
            self.found.paragraphs.append([])
            return
        self._put(_BREAK if letter == "&" else " " if letter in "~\n\t" else letter)
        if row is not None and not letter.isspace():
            row.tokens.append(
                Token("l" if letter.isalpha() else "n" if letter.isnumeric() else "s", letter, line)
            )

    def _formula(self, nodes: list[Any], row: FormulaRow | None, *, is_inner: bool) -> None:
        r"""Read mathematics: a row of its own, or a part of the one whose \text it is in."""
        if row is None:
            row = FormulaRow(is_script=False, is_inner=is_inner)
            self.found.rows.append(row)
        self.math(nodes, row)

    def math(self, nodes: list[Any], row: FormulaRow) -> None:
        """Read mathematics into a row."""
        items = [item for item in self._items(nodes) if not (isinstance(item, tuple) and item[0].isspace())]
        at = 0
        while at < len(items):
            item = items[at]
            at += 1
            if not isinstance(item, tuple):
                if isinstance(item, self.tex.LatexMacroNode) and item.macroname in words.DELIMITED:
                    self._delimiter(item, items[at] if at < len(items) else None, row)
                    at += 1
                else:
                    self._math_node(item, row)
            elif item[0] in "^_":
                self._script(items[at : at + 1], row, self._at(item[1]))
                at += 1
            elif item[0].isnumeric():
                text, line = item[0], self._at(item[1])
                while (
                    at < len(items) and isinstance(items[at], tuple) and _continues(*items[at - 1 : at + 1])
                ):
                    text += items[at][0]
                    at += 1
                self._number(text, line, row)
            else:
                self._math_letter(item[0], self._at(item[1]), row)

    def _number(self, text: str, line: int, row: FormulaRow) -> None:
        number = text.rstrip(".,")
        row.tokens.append(Token("n", number, line))
        row.tokens += [Token("s", sign, line) for sign in text[len(number) :]]
        self._put(HOLE)

    def _math_letter(self, letter: str, line: int, row: FormulaRow) -> None:
        if letter in "$#":
            raise NotAllowed(rf"{letter} in mathematics; write \{letter} for the sign", line)
        if letter == "&":
            row.tokens.append(Token("s", "&", line))
            self._put(_BREAK)
        elif letter not in "'~":
            row.tokens += [Token("l", letter, line)] if letter.isalpha() else _signs(letter, line)
            self._put(letter)

    def _math_node(self, node: Any, row: FormulaRow) -> None:
        line = self._at(node.pos)
        if isinstance(node, self.tex.LatexGroupNode):
            before = len(row.tokens)
            self.math(node.nodelist, row)
            if len(row.tokens) == before:
                row.tokens.append(Token(" ", "", line))
        elif isinstance(node, self.tex.LatexEnvironmentNode):
            if node.environmentname not in words.INNER_MATH_ENVIRONMENTS:
                raise _unknown_environment(node.environmentname, line)
            self._cells([node.nodelist], row, is_inner=True)
        elif isinstance(node, self.tex.LatexMathNode):
            raise NotAllowed(f"{node.delimiters[0]} within mathematics; close the formula before", line)
        else:
            self._command(node, words.MATH_COMMANDS, row, is_inner=row.is_inner)

    def _cells(self, parts: list[list[Any]], row: FormulaRow, *, is_inner: bool) -> None:
        """Read what is above and below another; in its row it counts as a number if it holds one."""
        line, cells = self._line, [FormulaRow(row.is_script, is_inner) for _ in parts]
        self.found.rows += cells
        for cell, nodes in zip(cells, parts, strict=True):
            self._put(HOLE)
            self.math(nodes, cell)
            self._put(HOLE)
        tokens = [token for cell in cells for token in cell.tokens]
        number = next((token.text for token in tokens if token.kind in "nvc"), None)
        has_letter = any(token.kind == "l" for token in tokens)
        row.tokens.append(Token("c" if number else "l" if has_letter else " ", number or "", line))

    def _script(self, nodes: list[Any], row: FormulaRow, line: int) -> None:
        is_open = row.kinds[-1:] == ")" and row.kinds.count(")") > row.kinds.count("(")
        if is_open or not _BASE.search(row.kinds):
            self.found.baseless.append(Finding(_BASELESS, line))
        first: Any = nodes[0] if nodes else ("^", 0)
        name = first[0] if isinstance(first, tuple) else getattr(first, "macroname", "")
        if name in ("^", "_", *words.DELIMITED):
            raise NotAllowed("a sub- or superscript is missing behind ^ or _; write it in braces", line)
        inner, kept = FormulaRow(is_script=True, is_inner=False), len(self.found.paragraphs[-1])
        self.found.rows.append(inner)
        self._put(HOLE)
        for node in nodes:
            if isinstance(node, tuple):
                letter, at = node
                if letter.isnumeric():
                    self._number(letter, self._at(at), inner)  # TeX takes one digit alone
                else:
                    self._math_letter(letter, self._at(at), inner)
            elif isinstance(node, self.tex.LatexGroupNode):
                self.math(node.nodelist, inner)
            else:
                self._math_node(node, inner)
        if not inner.tokens:
            del self.found.paragraphs[-1][kept:]  # an empty script parts no word
            return
        self._put(HOLE)
        is_number = len(inner.tokens) == 1 and inner.tokens[0].kind in "nv"
        row.tokens.append(Token("^", inner.tokens[0].text if is_number else "", line))

    def _delimiter(self, node: Any, bracket: Any, row: FormulaRow) -> None:
        line = self._at(node.pos)
        is_command = isinstance(bracket, self.tex.LatexMacroNode)
        name = bracket.macroname if is_command else bracket[0] if isinstance(bracket, tuple) else ""
        if not (name in words.DELIMITERS or (is_command and name in ("{", "}", "|"))):
            raise NotAllowed(rf"\{node.macroname} expects a bracket, or . for none", line)
        if name == ".":
            row.tokens.append(Token(" ", "", line))
        else:
            row.tokens += _signs(name, line)
            self._put(HOLE)

    def _command(self, node: Any, allowed: dict[str, str], row: FormulaRow | None, *, is_inner: bool) -> None:
        name, line = _plain(node.macroname), self._at(node.pos)
        if name not in allowed:
            raise _unknown_command(name, line, allowed)
        in_math = allowed is words.MATH_COMMANDS
        if not in_math:
            self._put(_BREAK if name == "\\" and self.tables else words.PRINTED.get(name, ""))
        elif row is not None and not allowed[name]:
            self._sign(name, line, row)
        kinds = re.findall(r"\??\w", allowed[name])
        given = node.nodeargd.argnlist if node.nodeargd is not None else []
        given = given[len(given) - len(kinds) :]  # \operatorname has a star before
        arguments = [self._argument(name, kind, part, line) for kind, part in zip(kinds, given, strict=True)]
        names: list[str] = []
        if in_math and row is not None and name in _CELLS:
            self._cells(
                [part.nodelist for part in arguments if part], row, is_inner=is_inner or name != "binom"
            )
            return
        for kind, part in zip(kinds, arguments, strict=True):
            if part is None:
                continue
            if kind[-1] == "m" and row is not None:
                self._math_node(part, row)
            elif kind[-1] == "p" and in_math and row is not None:
                self.prose(part.nodelist, row)
            elif kind[-1] == "p":
                self._put(_BREAK if name in _APART else "")
                self.prose(part.nodelist, row)
                self._put(_BREAK if name in _APART else "")
            else:
                names.append(self._verbatim(part, name, line))
        if names:
            self._line = line
            self.found.uses.append(Use(name, tuple(names), line, len(self.found.paragraphs) - 1))
            self._put("" if name == "label" else _MARKS.get(name, HOLE))
            if row is not None and _MARKS.get(name) == VALUE:
                row.tokens.append(Token("v", VALUE, line))

    def _argument(self, name: str, kind: str, part: Any, line: int) -> Any:
        opening = "[" if kind[0] == "?" else "{"
        if part is None and opening == "[":
            return None
        delimiters = getattr(part, "delimiters", None) or "?"
        if delimiters[0] != opening:
            raise NotAllowed(rf"\{name} expects {opening} here", line)
        return part

    def _verbatim(self, part: Any, command: str, line: int) -> str:
        """Return a name in braces: names hold no braces, backslashes or comments."""
        text = self.source[part.pos + 1 : part.pos + part.len - 1]
        if any(sign in text for sign in "{}\\%\n$~#"):
            raise NotAllowed(rf"\{command} expects a plain name in braces, got {text[:40]!r}", line)
        return text.strip()

    def _sign(self, name: str, line: int, row: FormulaRow) -> None:
        """Take a command of mathematics without arguments."""
        if name in words.SPACES or name in words.UNPRINTED:
            row.tokens.append(Token(" ", "", line))
            self._put(" " if name in words.SPACES else "")
        elif name == "\\":
            row.tokens.append(Token("\n", "", line))
            self._put(" ")
        elif name not in words.LIMITS:
            row.tokens += _signs(name, line)
            self._put(words.MATH_PRINTED.get(name, HOLE))

    def _environment(self, node: Any, row: FormulaRow | None) -> None:
        name, line = node.environmentname, self._line
        if name in words.MATH_ENVIRONMENTS:
            self._formula(node.nodelist, row, is_inner=True)
            return
        if name not in words.PROSE_ENVIRONMENTS:
            raise _unknown_environment(name, line)
        is_table = name == "tabular"
        if is_table:
            columns = self._verbatim(
                self._argument(name, "k", node.nodeargd.argnlist[0], line), "begin{tabular}", line
            )
            if not columns or set(columns) - set("lcr|"):
                raise NotAllowed(f"columns of a tabular are letters of l, c, r and |, got {columns!r}", line)
        self._put(" " if is_table else _BREAK)  # a table may be next to what is before it
        self.tables += is_table
        self.prose(node.nodelist, row, in_table=is_table)
        self.tables -= is_table
        self._put(" " if is_table else _BREAK)


def _continues(last: Any, item: Any) -> bool:
    """Whether a character directly behind the last one continues its number."""
    return item[1] == last[1] + 1 and (item[0].isnumeric() or item[0] in ".,")


def _signs(name: str, line: int) -> list[Token]:
    """Return what a character or command that prints one sign is in a row."""
    if name in words.SUMS:
        return [Token("o", name, line), Token("l", name, line)]
    kinds = {
        "o": words.OPERATORS,
        "l": words.LETTERS,
        "(": words.OPENING,
        ")": words.CLOSING,
        "|": words.BARS,
    }
    return [Token(next((kind for kind, names in kinds.items() if name in names), "s"), name, line)]
