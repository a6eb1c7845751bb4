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
from caramba.paper import numbers
from caramba.paper.numbers import BREAK, CELLS, CELLS_END, EMPTY, SCRIPT, SCRIPT_END, Text

_PRINTED = {
    "-": "", "break": BREAK, "space": " ", "hole": numbers.HOLE, "value": numbers.VALUE, "empty": EMPTY,
    "reference": numbers.REFERENCE, "year": numbers.YEAR, "author": numbers.AUTHOR, "letter": numbers.LETTER,
    "sum": f"={numbers.LETTER}", "by": "\u00d7",
}  # fmt: skip


_TABLE = r"""
p - emph textbf textit texttt textsc textrm textsf text underline textsuperscript textsubscript mbox
p break footnote paragraph subsection subsubsection caption
?p break item
?p?pn hole cite citep
?p?pn author citet citeauthor
?p?pn year citeyear citealt citealp
nn value citednumber
n value result resultvalue setting
nnn value derived
nnn - claim
np break artifactfigure
n hole artifacttable
n - label
n reference ref pageref
n hole eqref autoref
m - mathbf mathrm mathit mathcal mathbb mathsf mathtt boldsymbol underbrace overbrace
m - hat bar tilde vec dot ddot widehat widetilde overline
*m - operatorname
mm cells frac tfrac dfrac binom
?mm cells sqrt
- itself % & $ # _ { } i j l L o O
- space quad qquad par newline \ , : ;
- § S
- … ldots dots
- - / - ' ` " ^ ~ = . c v u H k r ss ae AE oe OE aa AA LaTeX TeX noindent centering small footnotesize
- - textbackslash textasciitilde textasciicircum textbar textless textgreater toprule midrule bottomrule
- - limits nolimits prime left right middle big bigl bigr Big Bigl Bigr
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
- empty displaystyle textstyle nonumber notag
- hole emptyset neg infty odot circ star ast dagger top bot mid cdots vdots ddots colon
- · cdot bullet
- by times
"""


def _commands() -> dict[str, tuple[list[str], str]]:
    r"""Return the arguments of commands and what they print, by name, from lines of arguments, print, and names.

    An argument is `p` prose, `m` mathematics, or `n` a name; `?` before a letter is for square brackets, which may be
    left out, and `*` for a star. \cdot is no operator: 2\cdot1 reads as 2.1.
    """
    found: dict[str, tuple[list[str], str]] = {" ": ([], " ")}
    for kinds, printed, *names in map(str.split, _TABLE.strip().splitlines()):
        for name in names:
            shown = name if printed == "itself" else _PRINTED.get(printed, printed)
            found[name] = re.findall(r"\*|\??[a-z]", kinds), shown
    return found


COMMANDS = _commands()
PROSE_ENVIRONMENTS = (
    "itemize", "enumerate", "description", "quote", "quotation", "center", "table", "figure", "tabular",
)  # fmt: skip
MATH_ENVIRONMENTS = ("align", "align*", "equation", "equation*", "gather", "gather*")
_INNER_ENVIRONMENTS = ("aligned", "cases", "matrix", "pmatrix", "bmatrix", "split")

_KNOWN = {*COMMANDS, *"()[]", "begin", "end"}
_NAMED = re.compile(r"\\([A-Za-z]+|.|$)|%[^\n]*", re.DOTALL)
_BRACKETED = re.compile(
    r"\\(left|right|middle|[bB]ig[lr]?)(?![A-Za-z])"
    r"(?!\s*(?:[()\[\]|/<>.]|\\(?:[{}|]|[lr]?(?:angle|floor|ceil|[vV]ert)(?![A-Za-z]))))"
)
_BLANK_LINE = re.compile(r"\n[ \t]*\n")


class NotAllowed(Exception):  # noqa: N818 - names the finding
    """The section cannot be read; its arguments are the reason and the line in the section."""


@dataclass(frozen=True)
class Use:
    """A command that names something: its name, its arguments as written, and its line (from 1)."""

    command: str
    arguments: tuple[str, ...]
    line: int


@dataclass
class Scanned:
    """What a section uses and prints. `problems` are those of the checks, of which an accepted section has none."""

    uses: list[Use] = field(default_factory=lambda: [])
    text: Text = field(default_factory=lambda: [])
    problems: tuple[str, ...] = ()

    def citation_keys(self) -> list[str]:
        """Return the keys of the works that it cites, in order."""
        uses = [use for use in self.uses if use.command.startswith("cite")]
        return [key.strip() for use in uses for key in use.arguments[0].split(",")]


def scan(source: str) -> Scanned:
    """Read a section's body.

    Raises:
        NotAllowed: a character, command or environment that is not on the list, or braces that do not match.
    """
    _check_source(source)
    tex, grammar = _parser()
    reader = _Reader(source, tex)
    try:
        nodes, _, _ = tex.LatexWalker(source, latex_context=grammar, tolerant_parsing=False).get_latex_nodes()
        reader.walk(nodes)
    except tex.LatexWalkerParseError as error:
        text = re.sub(r"Unexpected end of stream, was expecting '?(.+?)'?$", r"\1 is missing", error.msg)
        raise NotAllowed(f"{text}; close what is open, in order", error.lineno or 1) from None
    except RecursionError:
        raise NotAllowed("too many groups within each other; close some", 1) from None
    return reader.found


def _check_source(source: str) -> None:
    """Refuse characters and commands on the raw text, before anything is parsed."""
    for line, text in enumerate(source.split("\n"), 1):
        for letter in text:
            kind, is_styled = unicodedata.category(letter)[0], unicodedata.decomposition(letter).startswith("<")
            if (kind == "C" and letter != "\t") or (kind == "L" and is_styled):
                plain = unicodedata.normalize("NFKC", letter) if is_styled else ""
                raise NotAllowed(f"character U+{ord(letter):04X} is hidden, joined or styled; write {plain!r}", line)
        if "^^" in text:
            raise NotAllowed("^^ is not allowed; write the character itself", line)
        if "caramba:" in text.partition("%")[2]:
            raise NotAllowed("comments that begin with caramba: mark sections and are written by code", line)
    for found in _NAMED.finditer(source):
        name, line = found[1], source.count("\n", 0, found.start()) + 1
        if name == "":
            raise NotAllowed("a backslash at the end", line)
        if name and name not in _KNOWN and not name.isspace():
            hint = (nearest(name, COMMANDS) if len(name) > 2 else None) or "; get_paper_template lists them"
            raise NotAllowed(rf"\{name} is not a command that a section may use{hint}", line)
        if _BRACKETED.match(source, found.start()):
            raise NotAllowed(rf"\{name} expects a bracket, or . for none", line)


@functools.cache
def _parser() -> tuple[Any, Any]:
    """Return pylatexenc's walker and the commands and environments that it shall know."""
    need_library("pylatexenc", "paper", "paper")
    spec: Any = importlib.import_module("pylatexenc.macrospec")
    forms = {name: "".join("[" if kind[0] == "?" else "*" if kind == "*" else "{" for kind in kinds)
             for name, (kinds, _) in COMMANDS.items()}  # fmt: skip
    environments = (*PROSE_ENVIRONMENTS, *MATH_ENVIRONMENTS, *_INNER_ENVIRONMENTS)
    grammar = spec.LatexContextDb()
    grammar.add_context_category(
        "section",
        macros=[spec.MacroSpec(name, form) for name, form in forms.items()],
        environments=[spec.EnvironmentSpec(name, "{" if name == "tabular" else "",
                                           is_math_mode=name not in PROSE_ENVIRONMENTS) for name in environments],
    )  # fmt: skip
    return importlib.import_module("pylatexenc.latexwalker"), grammar


class _Reader:
    """Walks the nodes of a section and takes down what it prints. `line` is that of what is printed next.

    `in_math` is off in prose, also within a formula (`in_formula`).
    """

    def __init__(self, source: str, tex: Any) -> None:
        self.source, self.tex, self.found = source, tex, Scanned()
        self.in_math, self.in_formula, self.in_table, self.line = False, False, False, 1
        self._lines = list(itertools.accumulate((letter == "\n" for letter in source), initial=1))

    def _refuse(self, text: str) -> NotAllowed:
        return NotAllowed(text, self.line)

    def _put(self, shown: str) -> None:
        self.found.text += [(letter, self.line) for letter in shown]

    @contextlib.contextmanager
    def _within(self, opening: str, closing: str, **states: bool) -> Iterator[None]:
        """Print an opening and a closing around what is read in other states."""
        outer = {name: getattr(self, name) for name in states}
        self._put(opening)
        vars(self).update(states)
        yield
        vars(self).update(outer)
        self._put(closing)

    def walk(self, nodes: Iterable[Any]) -> None:
        """Read text or mathematics."""
        items: list[tuple[Any, int]] = []
        for node in nodes:
            if isinstance(node, self.tex.LatexCharsNode):
                letters = zip(node.chars, itertools.count(node.pos), strict=False)
                items += [pair for pair in letters if not (self.in_math and pair[0].isspace())]
            else:
                items.append((node, node.pos))
        left = iter(items)
        for item, at in left:
            self.line = self._lines[at]
            if not (self.in_math and isinstance(item, str) and item in "^_"):
                self._read(item, at)
                continue
            base, at = next(left, ("^", at))
            if (base if isinstance(base, str) else getattr(base, "macroname", "")) in ("^", "_"):
                raise self._refuse("a sub- or superscript is missing behind ^ or _; write it in braces")
            with self._within(SCRIPT, SCRIPT_END):
                self._read(base, at)

    def _read(self, item: Any, at: int) -> None:
        tex = self.tex
        if isinstance(item, str):
            self._letter(item, at)
        elif isinstance(item, tex.LatexGroupNode):
            self._group(item.nodelist)
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
        elif self.in_math:
            self._put("" if letter in "'~" else letter.translate(numbers.TO_FORMULA))
        else:
            self._put(" " if letter in "~\n\t" else letter)

    def _group(self, nodes: list[Any]) -> None:
        """Read a group; one of mathematics that prints nothing is no base of a script."""
        before = len(self.found.text)
        self.walk(nodes)
        self._put(EMPTY if self.in_formula and len(self.found.text) == before else "")

    def _formula(self, nodes: list[Any], *, is_display: bool) -> None:
        r"""Read mathematics: a formula of its own, or a part of the one whose \text it is in."""
        marks = (
            ("", "") if self.in_formula else (numbers.DISPLAY if is_display else numbers.FORMULA, numbers.FORMULA_END)
        )
        with self._within(*marks, in_math=True, in_formula=True):
            self.walk(nodes)

    def _cells(self, parts: Iterable[list[Any]]) -> None:
        """Read what is above and below another."""
        with self._within(CELLS, CELLS_END):
            for index, nodes in enumerate(parts):
                self._put("=" if index else "")
                self.walk(nodes)

    def _command(self, name: str, node: Any) -> None:
        (kinds, printed), line, in_table = COMMANDS[name], self.line, self.in_table
        if "m" in kinds and not self.in_math:
            raise self._refuse(rf"\{name} outside of a formula; write it within $ and $")
        if name == "\\":
            printed = BREAK if in_table else "\n" if self.in_math else " "
        given = node.nodeargd.argnlist if node.nodeargd is not None else []
        arguments = [(kind[-1], part) for kind, part in zip(kinds, given, strict=True)
                     if part is not None and kind != "*"]  # fmt: skip
        if not all(isinstance(part, self.tex.LatexGroupNode) for _, part in arguments):
            raise self._refuse(rf"\{name} expects {{ here")
        if printed == "cells":
            self._cells(part.nodelist for _, part in arguments)
            return
        self._put(printed)
        names: list[str] = []
        for kind, part in arguments:
            if kind == "n":
                names.append(self._verbatim(part, name))
            else:
                with self._within("", "", in_math=kind == "m"):
                    self._group(part.nodelist)
        self.found.uses += [Use(name, tuple(names), line)] if names else []
        self._put(BREAK if printed == BREAK and kinds else "")

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
            is_table = name == "tabular"
            columns = self._verbatim(node.nodeargd.argnlist[0], "begin{tabular}") if is_table else "l"
            if not columns or set(columns) - set("lcr|"):
                raise self._refuse(f"columns of a tabular are letters of l, c, r and |, got {columns!r}")
            around = " " if is_table else BREAK  # a table may be next to what is before it
            with self._within(around, around, in_table=is_table):
                self.walk(node.nodelist)
