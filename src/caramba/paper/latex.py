"""Flattens the LaTeX of a section, parsed by pylatexenc, to what it prints and the names it uses."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from caramba.config.optional_deps import need_library
from caramba.errors import nearest
from caramba.paper import vocabulary as words

_DEEPEST = 60  # groups within each other
_TOO_DEEP = f"more than {_DEEPEST} groups within each other; close some"
_CELLS = frozenset(("frac", "tfrac", "dfrac", "binom", "sqrt"))
_APART = frozenset(("footnote", "caption", "paragraph", "subsection", "subsubsection", "artifactfigure"))
_KNOWN = frozenset((*words.PROSE_COMMANDS, *words.MATH_COMMANDS, "(", ")", "[", "]", "begin", "end"))
_PROSE = (*words.PROSE_ENVIRONMENTS, *sorted(words.MATH_ENVIRONMENTS))
_TOKEN = re.compile(r"\\([A-Za-z]+|.|$)|%[^\n]*|[{}]", re.DOTALL)
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

    def citation_keys(self) -> list[str]:
        """Return the keys of the works that it cites, in order."""
        uses = [use for use in self.uses if use.command.startswith("cite")]
        return [key.strip() for use in uses for key in use.arguments[0].split(",")]

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
        raise NotAllowed(_TOO_DEEP, 1) from None
    return reader.found


def _line_of(source: str, at: int) -> int:
    return source.count("\n", 0, at) + 1


def _check_characters(source: str) -> None:
    for line, text in enumerate(source.split("\n"), 1):
        for letter in text:
            category = unicodedata.category(letter)
            if (category[0] == "C" and letter != "\t") or letter == words.HOLE:
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
        text = f"{found[1].strip()} expects a bracket, or . for none"
        raise NotAllowed(text, _line_of(source, found.start()))
    return " " * len(found[1]) + (" " if bracket == "." else bracket)


def _check_commands(source: str) -> None:
    """Refuse commands and depth on the raw text, before anything is parsed."""
    depth = 0
    for found in _TOKEN.finditer(source):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        name, line = found[1], functools.partial(_line_of, source, found.start())
        if depth > _DEEPEST:
            raise NotAllowed(_TOO_DEEP, line())
        if name == "":
            raise NotAllowed("a backslash at the end", line())
        if name is not None and _plain(name) not in _KNOWN:
            raise _unknown_command(name, line(), words.PROSE_COMMANDS)


def _unknown_command(name: str, line: int, allowed: dict[str, str]) -> NotAllowed:
    hint = nearest(name, allowed) if len(name) > 2 else None
    where = " in mathematics" if allowed is words.MATH_COMMANDS else ""
    return NotAllowed(
        rf"\{name} is not a command that a section may use{where}{hint or '; get_paper_template lists them'}",
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
    """Walks the nodes of a section and takes down what it prints. `line` is that of what is printed next."""

    def __init__(self, source: str, tex: Any) -> None:
        self.source, self.tex, self.found = source, tex, Scanned()
        self.tables, self.is_in_formula, self.line = 0, False, 1
        self._lines = list(itertools.accumulate((letter == "\n" for letter in source), initial=1))

    def _refuse(self, text: str) -> NotAllowed:
        return NotAllowed(text, self.line)

    def _put(self, letters: str) -> None:
        self.found.paragraphs[-1].extend((letter, self.line) for letter in letters)

    def walk(self, nodes: Iterable[Any], *, in_math: bool = False, in_table: bool = False) -> None:
        """Read text or mathematics."""
        items: list[tuple[Any, int]] = []
        for node in nodes:
            if isinstance(node, self.tex.LatexCharsNode):
                places = enumerate(node.chars, node.pos)
                items += [(letter, at) for at, letter in places if not (in_math and letter.isspace())]
            elif not isinstance(node, self.tex.LatexCommentNode):
                items.append((node, node.pos))
        left = iter(items)
        for item, at in left:
            self.line = self._lines[at]
            if not (in_math and isinstance(item, str) and item in "^_"):
                self._item(item, at, in_math=in_math, in_table=in_table)
                continue
            base, at = next(left, ("^", at))
            if (base if isinstance(base, str) else getattr(base, "macroname", "")) in ("^", "_"):
                raise self._refuse("a sub- or superscript is missing behind ^ or _; write it in braces")
            self._put(words.SCRIPT)
            self._item(base, at, in_math=True)
            self._put(words.SCRIPT_END)

    def _item(self, item: Any, at: int, *, in_math: bool, in_table: bool = False) -> None:
        self.line, tex = self._lines[at], self.tex
        if isinstance(item, str):
            self._letter(item, at, in_math=in_math, in_table=in_table)
        elif isinstance(item, tex.LatexGroupNode):
            self._group(item.nodelist, in_math=in_math)
        elif isinstance(item, tex.LatexEnvironmentNode):
            self._environment(item, in_math=in_math)
        elif not isinstance(item, tex.LatexMathNode):
            self._command(item, words.MATH_COMMANDS if in_math else words.PROSE_COMMANDS)
        elif in_math:
            raise self._refuse(f"{item.delimiters[0]} within mathematics; close the formula before")
        else:
            is_empty = all(isinstance(part, tex.LatexCommentNode) for part in item.nodelist)
            if item.delimiters[0] == "$$" or (item.delimiters[0] == "$" and is_empty):
                raise self._refuse("$$ is not allowed; use the environment equation")
            self._formula(item.nodelist, is_display=item.displaytype == "display")

    def _group(self, nodes: list[Any], *, in_math: bool) -> None:
        """Read a group; one of mathematics that prints nothing is no base of a script."""
        before = len(self.found.paragraphs[-1])
        self.walk(nodes, in_math=in_math)
        if in_math and len(self.found.paragraphs[-1]) == before:
            self._put(words.EMPTY)

    def _letter(self, letter: str, at: int, *, in_math: bool, in_table: bool) -> None:
        if letter in "#$" or (letter in "^_" and not in_math):
            where = "in" if in_math else "outside of"
            raise self._refuse(rf"{letter} {where} mathematics; write \{letter} for the sign")
        if letter == "&" and not (in_table or in_math):
            raise self._refuse(r"& outside of a table; write \& for the sign")
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

    def _cells(self, parts: Iterable[list[Any]]) -> None:
        """Read what is above and below another."""
        self._put(words.CELL)
        for nodes in parts:
            self._put("=")
            self.walk(nodes, in_math=True)
        self._put(words.CELL_END)

    def _command(self, node: Any, allowed: dict[str, str]) -> None:
        name, line, in_math = _plain(node.macroname), self.line, allowed is words.MATH_COMMANDS
        if name not in allowed:
            raise _unknown_command(name, line, allowed)
        is_row = name == "\\" and self.tables and not in_math
        self._put(words.BREAK if is_row else (words.MATH_PRINTED if in_math else words.PRINTED).get(name, ""))
        kinds = re.findall(r"\??\w", allowed[name])
        given = node.nodeargd.argnlist if node.nodeargd is not None else []
        given = given[len(given) - len(kinds) :]  # \operatorname has a star before
        arguments = [
            (kind[-1], self._argument(name, kind, part)) for kind, part in zip(kinds, given, strict=True)
        ]
        arguments = [(kind, part) for kind, part in arguments if part is not None]
        names: list[str] = []
        if name in _CELLS:
            self._cells(part.nodelist for _, part in arguments)
            return
        for kind, part in arguments:
            if kind == "m":
                self._group(part.nodelist, in_math=True)
            elif kind == "p":
                self._put(words.BREAK if name in _APART else "")
                self.walk(part.nodelist)
                self._put(words.BREAK if name in _APART else "")
            else:
                names.append(self._verbatim(part, name))
        if names:
            self.line = line
            self.found.uses.append(Use(name, tuple(names), line))
            self._put(words.MARKS.get(name, words.HOLE))

    def _argument(self, name: str, kind: str, part: Any) -> Any:
        opening = "[" if kind[0] == "?" else "{"
        if part is None and opening == "[":
            return None
        if (getattr(part, "delimiters", None) or "?")[0] != opening:
            raise self._refuse(rf"\{name} expects {opening} here")
        return part

    def _verbatim(self, part: Any, command: str) -> str:
        """Return a name in braces: names hold no braces, backslashes or comments."""
        text = self.source[part.pos + 1 : part.pos + part.len - 1]
        if any(sign in text for sign in "{}\\%\n$~#"):
            raise self._refuse(rf"\{command} expects a plain name in braces, got {text[:40]!r}")
        return text.strip()

    def _environment(self, node: Any, *, in_math: bool) -> None:
        name = node.environmentname
        allowed = words.INNER_MATH_ENVIRONMENTS if in_math else _PROSE
        if name not in allowed:
            hint = nearest(name, _PROSE) or "; they are " + ", ".join(_PROSE)
            raise self._refuse(f"environment {name!r} is not one that a section may use here{hint}")
        if in_math:
            self._cells([node.nodelist])
        elif name in words.MATH_ENVIRONMENTS:
            self._formula(node.nodelist, is_display=True)
        elif name == "tabular":
            columns = self._verbatim(self._argument(name, "k", node.nodeargd.argnlist[0]), "begin{tabular}")
            if not columns or set(columns) - set("lcr|"):
                raise self._refuse(f"columns of a tabular are letters of l, c, r and |, got {columns!r}")
            self._put(" ")  # a table may be next to what is before it
            self.tables += 1
            self.walk(node.nodelist, in_table=True)
            self.tables -= 1
            self._put(" ")
        else:
            self._put(words.BREAK)
            self.walk(node.nodelist)
            self._put(words.BREAK)
