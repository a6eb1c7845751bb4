"""The LaTeX that a section may use. What is not here is refused: a list of dangerous commands would have gaps.

A command maps to its arguments, one letter each: `p` prose, `m` mathematics, and the kinds of names that are looked
up: `r` result, `o` operation, `s` setting, `c` citations, `v` a cited value, `f` figure, `t` table, `l` label, `x`
reference, `k` columns. A `?` before a letter makes the argument optional, in square brackets.
"""

from __future__ import annotations

PROSE_COMMANDS: dict[str, str] = {
    **dict.fromkeys(("emph", "textbf", "textit", "texttt", "textsc", "textrm", "textsf", "underline"), "p"),
    **dict.fromkeys(("footnote", "paragraph", "subsection", "subsubsection", "caption"), "p"),
    **dict.fromkeys(("textsuperscript", "textsubscript", "mbox"), "p"),
    "item": "?p",
    **dict.fromkeys(("cite", "citep", "citet", "citealt", "citealp", "citeauthor", "citeyear"), "?p?pc"),
    "citednumber": "cv",
    "result": "r",
    "resultvalue": "r",
    "setting": "s",
    "derived": "orr",
    "claim": "rro",
    "artifactfigure": "fp",
    "artifacttable": "t",
    "label": "l",
    **dict.fromkeys(("ref", "eqref", "pageref", "autoref"), "x"),
    **dict.fromkeys(("%", "&", "$", "#", "_", "{", "}", "\\", ",", ";", ":", " ", "/", "-"), ""),
    **dict.fromkeys(("'", "`", '"', "^", "~", "=", ".", "c", "v", "u", "H", "k", "r"), ""),  # accents
    **dict.fromkeys(("ss", "o", "O", "l", "L", "ae", "AE", "oe", "OE", "aa", "AA", "i", "j"), ""),
    **dict.fromkeys(("ldots", "dots", "textbackslash", "textasciitilde", "textasciicircum", "textbar"), ""),
    **dict.fromkeys(("textless", "textgreater", "textendash", "textemdash", "textmu", "LaTeX", "TeX"), ""),
    **dict.fromkeys(
        ("quad", "qquad", "par", "noindent", "centering", "small", "footnotesize", "newline"), ""
    ),
    **dict.fromkeys(("toprule", "midrule", "bottomrule", "S", "P"), ""),
}


# What commands of prose print, where it is a part of a word or joins or parts words.
PRINTED = {
    **dict.fromkeys(("quad", "qquad", "par", "newline", "\\", " ", ",", ";", ":"), " "),
    **{letter: letter for letter in ("%", "&", "$", "#", "_", "{", "}", "i", "j", "l", "L", "o", "O")},
    **{"S": "\u00a7", "P": "\u00b6", "ldots": "\u2026", "dots": "\u2026", "item": " ; "},
    **{"textendash": "\u2013", "textemdash": "\u2014", "textmu": "\u00b5"},
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


GREEK = _names(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi pi rho sigma tau "
    "upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega ell hbar nabla partial"
)
FUNCTIONS = _names(
    "min max arg argmin argmax log ln exp sin cos tan tanh softmax lim sup inf det dim ker Pr gcd"
)
SUMS = _names("sum prod int bigcup bigcap")
# What separates two numbers. \cdot and the like do not: 2\cdot1 reads as a decimal point.
OPERATORS = _names(
    "+ - = < > * / times div pm mp cup cap setminus land lor oplus otimes le leq ge geq ll gg ne neq equiv approx sim "
    "simeq propto in notin ni subset subseteq supset supseteq forall exists to mapsto gets rightarrow leftarrow "
    "Rightarrow Leftarrow leftrightarrow iff implies longrightarrow uparrow downarrow parallel perp"
)
_NAMED = "langle rangle lfloor rfloor lceil rceil vert Vert lvert rvert lVert rVert { } |"
BRACKETS = frozenset("()[]|/<>.") | {rf"\{name}" for name in _NAMED.split()}
SPACES = frozenset((" ", ",", ":", ";", "quad", "qquad"))
UNPRINTED = frozenset(("!", "displaystyle", "textstyle", "nonumber", "notag"))
LIMITS = frozenset(("limits", "nolimits"))
# What a character or command of mathematics is in a formula: = an operator, x a letter, a bracket, a space, a comma.
FORMULA_MARKS = {
    **dict.fromkeys(OPERATORS, "="),
    **dict.fromkeys(SUMS, "=x"),
    **dict.fromkeys(GREEK | FUNCTIONS, "x"),
    **dict.fromkeys(_names("( [ { langle lfloor lceil lvert lVert"), "("),
    **dict.fromkeys(_names(") ] } rangle rfloor rceil rvert rVert"), ")"),
    **dict.fromkeys(_names("| vert Vert"), "|"),
    **dict.fromkeys(SPACES | UNPRINTED, " "),
    **dict.fromkeys(LIMITS, ""),
    **dict.fromkeys(_names("cdot mid ldots cdots dots"), ","),
    **{"\\": "\n", ",": " ", ":": " ", ";": " "},
}
MATH_PRINTED = {
    **dict.fromkeys((*SPACES, "\\"), " "),
    **dict.fromkeys((*UNPRINTED, *LIMITS), ""),
    **{"times": "\u00d7", "cdot": "\u00b7", "bullet": "\u00b7", "prime": "'"},
}
_SIGNS = (
    "cdot emptyset neg infty odot circ star ast bullet dagger top bot mid vert Vert lVert rVert lvert rvert langle "
    "rangle lfloor rfloor lceil rceil ldots cdots vdots ddots dots prime colon"
)
_MATH_WORDS = (*GREEK, *FUNCTIONS, *SUMS, *(name for name in OPERATORS if name.isalpha()), *LIMITS)
MATH_COMMANDS: dict[str, str] = {
    **dict.fromkeys((*_MATH_WORDS, *SPACES, *UNPRINTED, *_SIGNS.split()), ""),
    **dict.fromkeys(("{", "}", "|", "\\", "%", "_", "#", "&"), ""),
    **dict.fromkeys(
        ("mathbf", "mathrm", "mathit", "mathcal", "mathbb", "mathsf", "mathtt", "boldsymbol"), "m"
    ),
    **dict.fromkeys(("hat", "bar", "tilde", "vec", "dot", "ddot", "widehat", "widetilde", "overline"), "m"),
    **dict.fromkeys(("operatorname", "operatorname*", "underbrace", "overbrace"), "m"),
    **dict.fromkeys(("frac", "tfrac", "dfrac", "binom"), "mm"),
    "sqrt": "?mm",
    **dict.fromkeys(("text", "textrm", "textit", "textbf", "texttt"), "p"),
    "label": "l",
    **{name: PROSE_COMMANDS[name] for name in ("result", "resultvalue", "setting", "derived")},
}

PROSE_ENVIRONMENTS: dict[str, str] = {
    **dict.fromkeys(
        ("itemize", "enumerate", "description", "quote", "quotation", "center", "table", "figure"), ""
    ),
    "tabular": "k",
}
MATH_ENVIRONMENTS = frozenset({"equation", "equation*", "align", "align*", "gather", "gather*"})
INNER_MATH_ENVIRONMENTS = frozenset({"aligned", "cases", "matrix", "pmatrix", "bmatrix", "split"})

OPERATIONS = ("ratio", "difference", "percent_change")
DIRECTIONS = ("less", "more", "equal")
