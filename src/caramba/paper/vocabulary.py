"""The LaTeX that a section may use. What is not here is refused: a list of dangerous commands would have gaps.

A command maps to its arguments, one letter each: `p` prose, `m` mathematics, and the kinds of names that are looked
up: `r` result, `o` operation, `s` setting, `c` citations, `v` a cited value, `f` figure, `t` table, `l` label, `x`
reference, `k` columns. A `?` before a letter makes the argument optional, in square brackets.
"""

from __future__ import annotations

HOLE = "\ufffc"
"""Represents what a command or sign prints that is neither a letter nor a number."""
# Characters that no section may hold; each represents a number that code prints.
VALUE, REFERENCE, YEAR, AUTHOR = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
# In formulas: the ends of a formula, a script, and a fraction, root or matrix; a group that prints nothing; a letter.
FORMULA, DISPLAY, FORMULA_END, SCRIPT, SCRIPT_END, CELL, CELL_END, EMPTY, LETTER = map(
    chr, range(0xE010, 0xE019)
)
DIGITS = "".join(map(chr, range(0xE030, 0xE03A)))
BREAK = " ; "  # between cells and items, which are separate on the page


def _commands(text: str) -> dict[str, str]:
    """Read lines of an argument list, `-` for none, and the commands that take it."""
    lines = [line.split() for line in text.strip().splitlines()]
    return {name: "" if kinds == "-" else kinds for kinds, *names in lines for name in names}


def _each(words: str, printed: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), printed)


PROSE_COMMANDS = {" ": ""} | _commands(r"""
p emph textbf textit texttt textsc textrm textsf underline textsuperscript textsubscript mbox
p footnote paragraph subsection subsubsection caption
?p item
?p?pc cite citep citet citealt citealp citeauthor citeyear
cv citednumber
r result resultvalue
s setting
orr derived
rro claim
fp artifactfigure
t artifacttable
l label
x ref eqref pageref autoref
- % & $ # _ { } \ , ; : / - ' ` " ^ ~ = . c v u H k r ss o O l L ae AE oe OE aa AA i j LaTeX TeX S P
- ldots dots textbackslash textasciitilde textasciicircum textbar textless textgreater textendash textemdash textmu
- quad qquad par noindent centering small footnotesize newline toprule midrule bottomrule
""")
PRINTED = {" ": " ", "item": BREAK, "textendash": "\u2013", "textemdash": "\u2014", "textmu": "\u00b5",
           "S": "\u00a7", "P": "\u00b6", "ldots": "\u2026", "dots": "\u2026"}  # fmt: skip
PRINTED |= _each("quad qquad par newline \\ , ; :", " ") | {letter: letter for letter in "%&$#_{}ijlLoO"}
# What represents the number that a command prints, or for the name before it.
MARKS = {
    **_each("result resultvalue setting derived citednumber", VALUE),
    **_each("ref pageref", REFERENCE),
    **_each("citeyear citealt citealp", YEAR),
    **_each("citeauthor citet", AUTHOR),
    **_each("label claim", ""),
}
# What signs of formulas print: = is an operator, which separates two numbers. \cdot is none: 2\cdot1 reads as 2.1.
MATH_PRINTED = {
    **_each(
        "div pm mp cup cap setminus land lor oplus otimes le leq ge geq ll gg ne neq equiv approx sim simeq propto in "
        "notin ni subset subseteq supset supseteq forall exists to mapsto gets rightarrow leftarrow Rightarrow "
        "Leftarrow leftrightarrow iff implies longrightarrow uparrow downarrow parallel perp",
        "=",
    ),
    **_each("sum prod int bigcup bigcap", f"={LETTER}"),
    **_each(
        "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau "
        "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar nabla "
        "partial min max arg argmin argmax log ln exp sin cos tan tanh softmax lim sup inf det dim ker Pr gcd",
        LETTER,
    ),
    **_each("langle lfloor lceil lvert lVert", "("),
    **_each("rangle rfloor rceil rvert rVert", ")"),
    **_each("| vert Vert", "|"),
    **_each(", : ; quad qquad", " "),
    **_each("! displaystyle textstyle nonumber notag", EMPTY),
    **_each("limits nolimits prime", ""),
    **_each("cdot bullet", "\u00b7"),
    **_each(
        "emptyset neg infty odot circ star ast dagger top bot mid ldots cdots vdots ddots dots colon", HOLE
    ),
    **_each("% _ # &", HOLE),
    **{"{": "{", "}": "}", " ": " ", "\\": "\n", "times": "\u00d7"},
}
MATH_COMMANDS = dict.fromkeys(MATH_PRINTED, "") | _commands("""
m mathbf mathrm mathit mathcal mathbb mathsf mathtt boldsymbol operatorname operatorname* underbrace overbrace
m hat bar tilde vec dot ddot widehat widetilde overline
mm frac tfrac dfrac binom
?mm sqrt
p text textrm textit textbf texttt
l label
""")
MATH_COMMANDS |= {name: PROSE_COMMANDS[name] for name in ("result", "resultvalue", "setting", "derived")}
_NAMED = "langle rangle lfloor rfloor lceil rceil vert Vert lvert rvert lVert rVert { } |"
BRACKETS = frozenset("()[]|/<>.") | {rf"\{name}" for name in _NAMED.split()}

PROSE_ENVIRONMENTS = _each("itemize enumerate description quote quotation center table figure", "")
PROSE_ENVIRONMENTS |= {"tabular": "k"}
MATH_ENVIRONMENTS = frozenset({"equation", "equation*", "align", "align*", "gather", "gather*"})
INNER_MATH_ENVIRONMENTS = frozenset({"aligned", "cases", "matrix", "pmatrix", "bmatrix", "split"})

OPERATIONS = ("ratio", "difference", "percent_change")
DIRECTIONS = ("less", "more", "equal")
