"""What a section may hold, and what it prints: its LaTeX, parsed by pylatexenc, as text and the names it uses.

A command or environment that is not listed here is refused: a list of dangerous ones would have gaps.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from caramba.config.optional_deps import need_library
from caramba.errors import nearest
from caramba.paper.numbers import (
    AUTHOR,
    BASELESS,
    BREAK,
    EMPTY,
    HOLE,
    LETTER,
    REFERENCE,
    VALUE,
    YEAR,
    Found,
    Text,
    check_row,
    is_base,
    mark_of,
)  # fmt: skip

_PRINTED = {
    "-": "", "break": BREAK, "space": " ", "line": "\n", "hole": HOLE, "value": VALUE, "reference": REFERENCE,
    "year": YEAR, "author": AUTHOR, "letter": LETTER, "sum": f"={LETTER}", "empty": EMPTY, "en": "\u2013",
    "em": "\u2014", "micro": "\u00b5", "by": "\u00d7",
}  # fmt: skip


def _commands(text: str) -> dict[str, tuple[list[str], str]]:
    r"""Return the arguments of commands and what they print, by name, from lines of arguments, print, and names.

    An argument is `p` prose, `m` mathematics, `b` a bracket, or a name: `r` result, `o` operation, `s` setting, `c`
    citations, `v` a cited value, `f` figure, `t` table, `l` label, `x` reference. `?` before a letter is for square
    brackets, which may be left out, and `*` for a star. \cdot is no operator: 2\cdot1 reads as 2.1.
    """
    found: dict[str, tuple[list[str], str]] = {" ": ([], " ")}
    for kinds, printed, *names in map(str.split, text.strip().splitlines()):
        for name in names:
            shown = name if printed == "itself" else _PRINTED.get(printed, printed)
            found[name] = re.findall(r"\*|\??[a-z]", kinds), shown
    return found


PROSE_COMMANDS = _commands(r"""
p - emph textbf textit texttt textsc textrm textsf underline textsuperscript textsubscript mbox
p break footnote paragraph subsection subsubsection caption
?p break item
?p?pc hole cite citep
?p?pc author citet citeauthor
?p?pc year citeyear citealt citealp
cv value citednumber
r value result resultvalue
s value setting
orr value derived
rro - claim
fp break artifactfigure
t hole artifacttable
l - label
x reference ref pageref
x hole eqref autoref
- itself % & $ # _ { } i j l L o O
- space quad qquad par newline \ , ; :
- en textendash
- em textemdash
- micro textmu
- § S
- ¶ P
- … ldots dots
- - / - ' ` " ^ ~ = . c v u H k r ss ae AE oe OE aa AA LaTeX TeX noindent centering small footnotesize
- - textbackslash textasciitilde textasciicircum textbar textless textgreater toprule midrule bottomrule
""")
MATH_COMMANDS = _commands(r"""
m - mathbf mathrm mathit mathcal mathbb mathsf mathtt boldsymbol underbrace overbrace
m - hat bar tilde vec dot ddot widehat widetilde overline
*m - operatorname
mm cells frac tfrac dfrac binom
?mm cells sqrt
b - left right middle big bigl bigr Big Bigl Bigr
p - text textrm textit textbf texttt
l - label
r value result resultvalue
s value setting
orr value derived
- = div pm mp cup cap setminus land lor oplus otimes le leq ge geq ll gg ne neq equiv approx sim simeq propto in
- = notin ni subset subseteq supset supseteq forall exists to mapsto gets rightarrow leftarrow Rightarrow Leftarrow
- = leftrightarrow iff implies longrightarrow uparrow downarrow parallel perp
- sum sum prod int bigcup bigcap
- letter alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau
- letter upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar nabla
- letter partial min max arg argmin argmax log ln exp sin cos tan tanh softmax lim sup inf det dim ker Pr gcd
- ( langle lfloor lceil lvert lVert
- ) rangle rfloor rceil rvert rVert
- | | vert Vert
- space , : ; quad qquad
- empty ! displaystyle textstyle nonumber notag
- - limits nolimits prime
- hole emptyset neg infty odot circ star ast dagger top bot mid ldots cdots vdots ddots dots colon % _ # &
- itself { }
- line \
- · cdot bullet
- by times
""")
_BRACKETS = {
    *"()[]|/<>.",
    *(rf"\{name}" for name, (_, shown) in MATH_COMMANDS.items() if shown and shown in "()|{}"),
}
_KNOWN = {*PROSE_COMMANDS, *MATH_COMMANDS, *"()[]", "begin", "end"}

PROSE_ENVIRONMENTS = (
    "itemize", "enumerate", "description", "quote", "quotation", "center", "table", "figure", "tabular",
)  # fmt: skip
MATH_ENVIRONMENTS = ("align", "align*", "equation", "equation*", "gather", "gather*")
_INNER_ENVIRONMENTS = ("aligned", "cases", "matrix", "pmatrix", "bmatrix", "split")

_DEEPEST = 60  # groups within each other
_TOO_DEEP = f"more than {_DEEPEST} groups within each other; close some"
_TOKEN = re.compile(r"\\([A-Za-z]+|.|$)|%[^\n]*|[{}]", re.DOTALL)
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


@dataclass
class Scanned:
    """What a section uses and prints. The digits of formulas, and what is wrong in them, are separate.

    `problems` are those of the checks, with their lines, of which an accepted section has none.
    """

    uses: list[Use] = field(default_factory=lambda: [])
    text: Text = field(default_factory=lambda: [])
    digits: str = ""
    wrong: list[Found] = field(default_factory=lambda: [])
    problems: tuple[str, ...] = ()

    def citation_keys(self) -> list[str]:
        """Return the keys of the works that it cites, in order."""
        uses = [use for use in self.uses if use.command.startswith("cite")]
        return [key.strip() for use in uses for key in use.arguments[0].split(",")]


def list_names(command: str, sections: Iterable[Scanned]) -> list[tuple[str, ...]]:
    """Return the arguments that a command has in the sections, each once."""
    uses = (use for part in sections for use in part.uses)
    return list(dict.fromkeys(use.arguments for use in uses if use.command == command))


def scan(source: str) -> Scanned:
    """Read a section's body.

    Raises:
        NotAllowed: a character, command or environment that is not on the list, or braces that do not match.
    """
    _check_source(source)
    tex, grammar = _parser()
    reader, walker = (
        _Reader(source, tex),
        tex.LatexWalker(source, latex_context=grammar, tolerant_parsing=False),
    )
    try:
        reader.walk(walker.get_latex_nodes()[0])
    except tex.LatexWalkerParseError as error:
        opened = [line for _, _, line, _ in error.open_contexts if line is not None]
        where = f" for what opened on line {opened[-1]}" if opened else ""
        text = re.sub(r"Unexpected end of stream, was expecting '?(.+?)'?$", r"\1 is missing", error.msg)
        raise NotAllowed(f"{text}{where}; close what is open, in order", error.lineno or 1) from None
    except RecursionError:
        raise NotAllowed(_TOO_DEEP, 1) from None
    return reader.found


def _check_source(source: str) -> None:
    """Refuse characters, commands and depth on the raw text, before anything is parsed."""
    for line, text in enumerate(source.split("\n"), 1):
        for letter in text:
            category = unicodedata.category(letter)
            if (category[0] == "C" and letter != "\t") or letter == HOLE:
                raise NotAllowed(f"character U+{ord(letter):04X} is not allowed; write plain text", line)
            if category[0] == "L" and unicodedata.decomposition(letter).startswith("<"):
                plain = unicodedata.normalize("NFKC", letter)
                raise NotAllowed(f"{letter!r} is a joined or styled letter; write {plain!r}", line)
        if "^^" in text:
            raise NotAllowed("^^ is not allowed; write the character itself", line)
        if "caramba:" in text.partition("%")[2]:
            raise NotAllowed("comments that begin with caramba: mark sections and are written by code", line)
    depth = 0
    for found in _TOKEN.finditer(source):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        name = found[1]
        is_known = name is None or name in _KNOWN or name.isspace()
        if depth > _DEEPEST or name == "" or not is_known:
            line = source.count("\n", 0, found.start()) + 1
            text = _TOO_DEEP if depth > _DEEPEST else "a backslash at the end"
            raise NotAllowed(text, line) if is_known or not name else _unknown(name, line, PROSE_COMMANDS)


def _unknown(name: str, line: int, allowed: Iterable[str]) -> NotAllowed:
    hint = (nearest(name, allowed) if len(name) > 2 else None) or "; get_paper_template lists them"
    where = " in mathematics" if allowed is MATH_COMMANDS else ""
    return NotAllowed(rf"\{name} is not a command that a section may use{where}{hint}", line)


@functools.cache
def _parser() -> tuple[Any, Any]:
    """Return pylatexenc's walker and the commands and environments that it shall know."""
    need_library("pylatexenc", "paper", "paper")
    spec: Any = importlib.import_module("pylatexenc.macrospec")
    forms = {name: "".join("[" if kind[0] == "?" else "*" if kind == "*" else "{" for kind in kinds)
             for name, (kinds, _) in {**PROSE_COMMANDS, **MATH_COMMANDS}.items()}  # fmt: skip
    grammar = spec.LatexContextDb()
    grammar.add_context_category(
        "section",
        macros=[spec.MacroSpec(name, form) for name, form in forms.items()],
        environments=[
            spec.EnvironmentSpec(name, "{" if name == "tabular" else "", is_math_mode=name not in PROSE_ENVIRONMENTS)
            for name in (*PROSE_ENVIRONMENTS, *MATH_ENVIRONMENTS, *_INNER_ENVIRONMENTS)
        ],
    )
    return importlib.import_module("pylatexenc.latexwalker"), grammar


class _Reader:
    """Walks the nodes of a section and takes down what it prints. `line` is that of what is printed next.

    `rows` are the parts of the formula that is read, from the whole to the innermost: scripts, fractions, roots and
    matrices are rows of their own, in each of which numbers are read together.
    """

    def __init__(self, source: str, tex: Any) -> None:
        self.source, self.tex, self.found, self.rows = source, tex, Scanned(), list[Text]()
        self.in_math, self.in_table, self.line = False, False, 1
        self._lines = list(itertools.accumulate((letter == "\n" for letter in source), initial=1))

    def _refuse(self, text: str) -> NotAllowed:
        return NotAllowed(text, self.line)

    def _put(self, shown: str, in_row: str | None = None) -> None:
        """Print in the text and, in a formula, in its row, where it may be represented by something else."""
        visible = shown.replace(EMPTY, "").replace(LETTER, HOLE)
        self.found.text += [(letter, self.line) for letter in visible]
        if self.rows:
            self.rows[-1] += [(letter, self.line) for letter in (shown if in_row is None else in_row)]

    def walk(self, nodes: Iterable[Any], *, in_math: bool = False) -> None:
        """Read text or mathematics."""
        outer, self.in_math = self.in_math, in_math
        items: list[tuple[Any, int]] = []
        for node in nodes:
            if isinstance(node, self.tex.LatexCharsNode):
                letters = zip(node.chars, itertools.count(node.pos), strict=False)
                items += [pair for pair in letters if not (in_math and pair[0].isspace())]
            else:
                items.append((node, node.pos))
        left = iter(items)
        for item, at in left:
            self.line = self._lines[at]
            if in_math and isinstance(item, str) and item in "^_":
                self._script(*next(left, ("^", at)))
            else:
                self._item(item, at)
        self.in_math = outer

    def _item(self, item: Any, at: int) -> None:
        tex = self.tex
        if isinstance(item, str):
            self._letter(item, at)
        elif isinstance(item, tex.LatexGroupNode):
            self._group(item.nodelist, in_math=self.in_math)
        elif isinstance(item, tex.LatexEnvironmentNode):
            self._environment(item.environmentname, item)
        elif isinstance(item, tex.LatexMacroNode):
            self._command(" " if item.macroname.isspace() else item.macroname, item)
        elif isinstance(item, tex.LatexMathNode):
            is_empty = all(isinstance(part, tex.LatexCommentNode) for part in item.nodelist)
            if self.in_math:
                raise self._refuse(f"{item.delimiters[0]} within mathematics; close the formula before")
            if item.delimiters[0] == "$$" or (item.delimiters[0] == "$" and is_empty):
                raise self._refuse("$$ is not allowed; use the environment equation")
            self._formula(item.nodelist, is_display=item.displaytype == "display")

    def _letter(self, letter: str, at: int) -> None:
        if letter in "#$" or (letter in "^_&" and not (self.in_math or (letter == "&" and self.in_table))):
            raise self._refuse(rf"{letter} outside of a formula or table; write \{letter} for the sign")
        if letter == "&" or (letter == "\n" and _BLANK_LINE.match(self.source, at)):
            self._put(BREAK)
        elif self.in_math and letter in "0123456789":
            self.found.digits += letter
            self._put(HOLE, letter)
        elif not (self.in_math and letter in "'~"):
            self._put(" " if letter in "~\n\t" else letter)

    def _group(self, nodes: list[Any], *, in_math: bool) -> None:
        """Read a group; one of mathematics that prints nothing is no base of a script."""
        before = len(self.found.text)
        self.walk(nodes, in_math=in_math)
        self._put(EMPTY if in_math and len(self.found.text) == before else "")

    @contextlib.contextmanager
    def _row(self, *, is_script: bool = False, is_inner: bool = True) -> Iterator[Text]:
        self.rows.append([])
        yield self.rows[-1]
        self.found.wrong += check_row(self.rows.pop(), is_script=is_script, is_inner=is_inner)

    def _formula(self, nodes: list[Any], *, is_display: bool) -> None:
        r"""Read mathematics: a formula of its own, or a part of the one whose \text it is in."""
        with contextlib.nullcontext() if self.rows else self._row(is_inner=is_display):
            self.walk(nodes, in_math=True)

    def _script(self, base: Any, at: int) -> None:
        if (base if isinstance(base, str) else getattr(base, "macroname", "")) in ("^", "_"):
            raise self._refuse("a sub- or superscript is missing behind ^ or _; write it in braces")
        line, has_base = self.line, is_base(self.rows[-1])
        self._put(HOLE, "")
        with self._row(is_script=True, is_inner=False) as row:
            self._item(base, at)
        if not has_base or not row or row[0][0] == EMPTY:
            self.found.wrong.append((BASELESS, line))
        self._put(HOLE, mark_of(row, is_script=True))

    def _cells(self, parts: Iterable[list[Any]]) -> None:
        """Read what is above and below another."""
        self._put(HOLE, "")
        with self._row() as row:
            for nodes in parts:
                self._put("=")
                self.walk(nodes, in_math=True)
        self._put(HOLE, mark_of(row, is_script=False))

    def _command(self, name: str, node: Any) -> None:
        allowed, line, in_table = MATH_COMMANDS if self.in_math else PROSE_COMMANDS, self.line, self.in_table
        if name not in allowed:
            raise _unknown(name, line, allowed)
        kinds, printed = allowed[name]
        given = node.nodeargd.argnlist if node.nodeargd is not None else []
        arguments = [(kind[-1], part) for kind, part in zip(kinds, given, strict=True) if part is not None]
        for kind, part in arguments:
            if kind not in "b*" and not isinstance(part, self.tex.LatexGroupNode):
                raise self._refuse(rf"\{name} expects {{ here")
        if printed == "cells":
            self._cells(part.nodelist for _, part in arguments)
            return
        self._put(BREAK if in_table and name == "\\" else printed)
        names: list[str] = []
        for kind, part in arguments:
            if kind in "pm":
                self._group(part.nodelist, in_math=kind == "m")
            elif kind == "b":
                self._bracket(name, self.source[part.pos : part.pos + part.len].strip())
            elif kind != "*":
                names.append(self._verbatim(part, name))
        self.found.uses += [Use(name, tuple(names), line)] if names else []
        self._put(BREAK if printed == BREAK and kinds else "")

    def _bracket(self, name: str, bracket: str) -> None:
        if bracket not in _BRACKETS:
            raise self._refuse(rf"\{name} expects a bracket, or . for none")
        self._put(MATH_COMMANDS[bracket[1:]][1] if bracket[0] == "\\" else bracket.strip("."))

    def _verbatim(self, part: Any, command: str) -> str:
        """Return a name in braces: names hold no braces, backslashes or comments."""
        text = self.source[part.pos + 1 : part.pos + part.len - 1]
        if any(sign in text for sign in "{}\\%\n$~#"):
            raise self._refuse(rf"\{command} expects a plain name in braces, got {text[:40]!r}")
        return text.strip()

    def _environment(self, name: str, node: Any) -> None:
        allowed = _INNER_ENVIRONMENTS if self.in_math else (*PROSE_ENVIRONMENTS, *MATH_ENVIRONMENTS)
        if name not in allowed:
            hint = nearest(name, allowed) or "; they are " + ", ".join(allowed)
            raise self._refuse(f"environment {name!r} is not one that a section may use here{hint}")
        if self.in_math:
            self._cells([node.nodelist])
        elif name in MATH_ENVIRONMENTS:
            self._formula(node.nodelist, is_display=True)
        else:
            outer, self.in_table = self.in_table, name == "tabular"
            columns = self._verbatim(node.nodeargd.argnlist[0], "begin{tabular}") if self.in_table else "l"
            if not columns or set(columns) - set("lcr|"):
                raise self._refuse(f"columns of a tabular are letters of l, c, r and |, got {columns!r}")
            around = " " if self.in_table else BREAK  # a table may be next to what is before it
            self._put(around)
            self.walk(node.nodelist)
            self._put(around)
            self.in_table = outer
