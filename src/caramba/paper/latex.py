"""Flattens the LaTeX of a section, parsed by pylatexenc, to what it prints and the names it uses."""

from __future__ import annotations

import bisect
import functools
import importlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from caramba.config.optional_deps import need_library
from caramba.errors import nearest
from caramba.paper import vocabulary as words

_DEEPEST = 60  # groups within each other
_CELLS = frozenset(("frac", "tfrac", "dfrac", "binom", "sqrt"))
_APART = frozenset(("footnote", "caption", "paragraph", "subsection", "subsubsection", "artifactfigure"))
_KNOWN = frozenset((*words.PROSE_COMMANDS, *words.MATH_COMMANDS, "(", ")", "[", "]"))
_PROSE = (*words.PROSE_ENVIRONMENTS, *sorted(words.MATH_ENVIRONMENTS))
_ENVIRONMENTS = frozenset((*_PROSE, *words.INNER_MATH_ENVIRONMENTS))
_TOKEN = re.compile(r"\\([A-Za-z]+|.|$)|%[^\n]*|[{}]", re.DOTALL)
_NAMED = re.compile(r"\s*\{([^{}]*)\}")
_SIZED = re.compile(r"(\\(?:left|right|middle|[bB]ig[lr]?)(?![A-Za-z])\s*)(\\[A-Za-z]+|\\?.|$)", re.DOTALL)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


class NotAllowed(Exception):  # noqa: N818 - names the finding
    """The section cannot be read: `text` is the reason, `line` the line in the section."""

    def __init__(self, text: str, line: int) -> None:
        super().__init__(text)
        self.text, self.line = text, line


@dataclass(frozen=True)
class Use:
    """A command that names something: its name, its arguments as written, and its line (from 1)."""

    command: str
    arguments: tuple[str, ...]
    line: int


Text = list[tuple[str, int]]
"""Characters and the marks of `vocabulary`, each with its line."""


@dataclass
class Scanned:
    """What a section uses, and its paragraphs with their formulas."""

    uses: list[Use] = field(default_factory=lambda: [])
    paragraphs: list[Text] = field(default_factory=lambda: [[]])

    def uses_of(self, *commands: str) -> Iterable[Use]:
        """Yield the uses of some commands, in order."""
        return (use for use in self.uses if use.command in commands)

    def digits_of_formulas(self) -> str:
        """Return every digit that a formula prints."""
        letters = (letter for part in self.paragraphs for letter, _ in part)
        return "".join(str(words.DIGITS.index(letter)) for letter in letters if letter in words.DIGITS)


def scan(source: str) -> Scanned:
    """Read a section's body.

    Raises:
        NotAllowed: a character, command or environment that is not on the list, or braces that do not match.
    """
    _check_characters(source)
    source = _SIZED.sub(lambda found: _without_size(found, source), source)
    _check_commands(source)
    tex, grammar = _parser()
    reader = _Reader(source, tex)
    try:
        nodes = tex.LatexWalker(source, latex_context=grammar, tolerant_parsing=False).get_latex_nodes()[0]
        reader.walk(nodes)
    except tex.LatexWalkerParseError as error:
        raise NotAllowed(_syntax(error), error.lineno or 1) from None
    except RecursionError:
        raise NotAllowed(f"more than {_DEEPEST} groups within each other; close some", 1) from None
    return reader.found


def _line_of(source: str, at: int) -> int:
    return source.count("\n", 0, at) + 1


def _check_characters(source: str) -> None:
    for line, text in enumerate(source.split("\n"), 1):
        for letter in text:
            category = unicodedata.category(letter)
            if (category in ("Cc", "Cf", "Co", "Cs", "Cn") and letter != "\t") or letter == words.HOLE:
                raise NotAllowed(f"character U+{ord(letter):04X} is not allowed; write plain text", line)
            if category[0] == "L" and unicodedata.decomposition(letter).startswith("<"):
                plain = unicodedata.normalize("NFKC", letter)
                raise NotAllowed(f"{letter!r} is a joined or styled letter; write {plain!r}", line)
        if "^^" in text:
            raise NotAllowed("^^ is not allowed; write the character itself", line)
        if "caramba:" in text.partition("%")[2]:
            raise NotAllowed("comments that begin with caramba: mark sections and are written by code", line)


def _without_size(found: re.Match[str], source: str) -> str:
    r"""Return a bracket without the \left or \big before it, as long as both, so that places stay."""
    bracket = found[2]
    if bracket not in words.BRACKETS:
        raise NotAllowed(
            f"{found[1].strip()} expects a bracket, or . for none", _line_of(source, found.start())
        )
    return " " * len(found[1]) + (" " if bracket == "." else bracket)


def _check_commands(source: str) -> None:
    """Refuse commands, environments and depth on the raw text, before anything is parsed."""
    depth = 0
    for found in _TOKEN.finditer(source):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        name = found[1]
        if depth <= _DEEPEST and name is None:
            continue
        line = _line_of(source, found.start())
        if depth > _DEEPEST:
            raise NotAllowed(f"more than {_DEEPEST} groups within each other; close some", line)
        if name == "":
            raise NotAllowed("a backslash at the end", line)
        if name in ("begin", "end"):
            environment = _NAMED.match(source, found.end())
            if environment is None:
                raise NotAllowed(rf"\{name} expects a brace here", line)
            _check_environment(environment[1], line, _ENVIRONMENTS)
        elif name is not None and _plain(name) not in _KNOWN:
            raise _unknown_command(name, line, words.PROSE_COMMANDS)


def _unknown_command(name: str, line: int, allowed: dict[str, str]) -> NotAllowed:
    hint = nearest(name, allowed) if len(name) > 2 else None
    where = " in mathematics" if allowed is words.MATH_COMMANDS else ""
    return NotAllowed(
        rf"\{name} is not a command that a section may use{where}{hint or '; get_paper_template lists them'}",
        line,
    )


def _check_environment(name: str, line: int, allowed: Iterable[str]) -> None:
    if name not in allowed:
        hint = nearest(name, _PROSE) or "; they are " + ", ".join(_PROSE)
        raise NotAllowed(f"environment {name!r} is not one that a section may use{hint}", line)


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
        self.is_in_formula = False
        self._ends = [at for at, letter in enumerate(source) if letter == "\n"]
        self._line = 1

    def _at(self, at: int) -> int:
        """Return the line of a place, and keep it for what is printed next."""
        self._line = bisect.bisect_left(self._ends, at) + 1
        return self._line

    def _put(self, letters: str) -> None:
        self.found.paragraphs[-1].extend((letter, self._line) for letter in letters)

    def walk(self, nodes: Iterable[Any], *, in_math: bool = False, in_table: bool = False) -> None:
        """Read text or mathematics."""
        items: list[Any] = []
        for node in nodes:
            if isinstance(node, self.tex.LatexCharsNode):
                places = ((letter, node.pos + index) for index, letter in enumerate(node.chars))
                items += [place for place in places if not (in_math and place[0].isspace())]
            elif not isinstance(node, self.tex.LatexCommentNode):
                items.append(node)
        left = iter(items)
        for item in left:
            if in_math and isinstance(item, tuple) and item[0] in "^_":
                self._script(next(left, None), self._at(item[1]))
            else:
                self._item(item, in_math=in_math, in_table=in_table)

    def _item(self, item: Any, *, in_math: bool, in_table: bool = False) -> None:
        line = self._at(item[1] if isinstance(item, tuple) else item.pos)
        if isinstance(item, tuple):
            self._letter(*item, in_math=in_math, in_table=in_table)
        elif isinstance(item, self.tex.LatexGroupNode):
            self._group(item.nodelist, in_math=in_math)
        elif isinstance(item, self.tex.LatexEnvironmentNode):
            self._environment(item, in_math=in_math)
        elif not isinstance(item, self.tex.LatexMathNode):
            self._command(item, words.MATH_COMMANDS if in_math else words.PROSE_COMMANDS)
        elif in_math:
            raise NotAllowed(f"{item.delimiters[0]} within mathematics; close the formula before", line)
        else:
            is_empty = all(isinstance(part, self.tex.LatexCommentNode) for part in item.nodelist)
            if item.delimiters[0] == "$$" or (item.delimiters[0] == "$" and is_empty):
                raise NotAllowed("$$ is not allowed; use the environment equation", line)
            self._formula(item.nodelist, is_display=item.displaytype == "display")

    def _group(self, nodes: list[Any], *, in_math: bool) -> None:
        """Read a group; one of mathematics that prints nothing is no base of a script."""
        before = len(self.found.paragraphs[-1])
        self.walk(nodes, in_math=in_math)
        if in_math and len(self.found.paragraphs[-1]) == before:
            self._put(words.EMPTY)

    def _letter(self, letter: str, at: int, *, in_math: bool, in_table: bool) -> None:
        if letter == "#" or (letter in "^_$" and not (in_math and letter != "$")):
            where = "in" if in_math else "outside of"
            raise NotAllowed(rf"{letter} {where} mathematics; write \{letter} for the sign", self._line)
        if letter == "&" and not (in_table or in_math):
            raise NotAllowed(r"& outside of a table; write \& for the sign", self._line)
        if letter == "\n" and not self.is_in_formula and _BLANK_LINE.match(self.source, at):
            self.found.paragraphs.append([])
        elif in_math and letter in "0123456789":
            self._put(words.DIGITS[int(letter)])
        elif not (in_math and letter in "'~"):
            self._put(words.BREAK if letter == "&" else " " if letter in "~\n\t" else letter)

    def _formula(self, nodes: list[Any], *, is_display: bool) -> None:
        r"""Read mathematics: a formula of its own, or a part of the one whose \text it is in."""
        is_whole = not self.is_in_formula
        self.is_in_formula = True
        self._put((words.DISPLAY if is_display else words.FORMULA) if is_whole else "")
        self.walk(nodes, in_math=True)
        self._put(words.FORMULA_END if is_whole else "")
        self.is_in_formula = not is_whole

    def _script(self, item: Any, line: int) -> None:
        if item is None or (item[0] if isinstance(item, tuple) else getattr(item, "macroname", "")) in (
            "^",
            "_",
        ):
            raise NotAllowed("a sub- or superscript is missing behind ^ or _; write it in braces", line)
        self._put(words.SCRIPT)
        self._item(item, in_math=True)
        self._put(words.SCRIPT_END)

    def _cells(self, parts: Iterable[list[Any]]) -> None:
        """Read what is above and below another."""
        self._put(words.CELL)
        for nodes in parts:
            self._put("=")
            self.walk(nodes, in_math=True)
        self._put(words.CELL_END)

    def _command(self, node: Any, allowed: dict[str, str]) -> None:
        name, line, in_math = _plain(node.macroname), self._line, allowed is words.MATH_COMMANDS
        if name not in allowed:
            raise _unknown_command(name, line, allowed)
        if in_math or (name == "\\" and self.tables):
            self._put(words.MATH_PRINTED.get(name, "") if in_math else words.BREAK)
        else:
            self._put(words.PRINTED.get(name, ""))
        kinds = re.findall(r"\??\w", allowed[name])
        given = node.nodeargd.argnlist if node.nodeargd is not None else []
        given = given[len(given) - len(kinds) :]  # \operatorname has a star before
        arguments = [self._argument(name, kind, part, line) for kind, part in zip(kinds, given, strict=True)]
        if name in _CELLS:
            self._cells(part.nodelist for part in arguments if part is not None)
            return
        names: list[str] = []
        for kind, part in zip(kinds, arguments, strict=True):
            if part is None:
                continue
            if kind[-1] == "m":
                self._group(part.nodelist, in_math=True)
            elif kind[-1] == "p":
                self._put(words.BREAK if name in _APART else "")
                self.walk(part.nodelist)
                self._put(words.BREAK if name in _APART else "")
            else:
                names.append(self._verbatim(part, name, line))
        if names:
            self._line = line
            self.found.uses.append(Use(name, tuple(names), line))
            self._put(words.MARKS.get(name, words.HOLE))

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

    def _environment(self, node: Any, *, in_math: bool) -> None:
        name, line = node.environmentname, self._line
        if in_math:
            _check_environment(name, line, words.INNER_MATH_ENVIRONMENTS)
            self._cells([node.nodelist])
            return
        _check_environment(name, line, _PROSE)
        if name in words.MATH_ENVIRONMENTS:
            self._formula(node.nodelist, is_display=True)
            return
        is_table = name == "tabular"
        if is_table:
            part = self._argument(name, "k", node.nodeargd.argnlist[0], line)
            columns = self._verbatim(part, "begin{tabular}", line)
            if not columns or set(columns) - set("lcr|"):
                raise NotAllowed(f"columns of a tabular are letters of l, c, r and |, got {columns!r}", line)
        self._put(" " if is_table else words.BREAK)  # a table may be next to what is before it
        self.tables += is_table
        self.walk(node.nodelist, in_table=is_table)
        self.tables -= is_table
        self._put(" " if is_table else words.BREAK)
