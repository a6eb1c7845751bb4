"""The independent check of a text: compiled with macros that print nothing, its PDF may show no other digit.

It reads what LaTeX printed, not what the scanner saw, so a digit that the scanner missed is found.
"""

from __future__ import annotations

import importlib
import io
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from caramba.config.optional_deps import need_library
from caramba.paper.check import check_section, section_names
from caramba.paper.compile import compile_paper
from caramba.paper.evidence import Evidence
from caramba.paper.records import Record

_BLIND = r"""\documentclass[11pt]{article}
\usepackage[utf8]{inputenc}
\usepackage{amsmath,amssymb,booktabs}
\usepackage[margin=1in]{geometry}
\pagestyle{empty}\raggedright\hyphenpenalty=10000\exhyphenpenalty=10000
\DeclareMathOperator{\softmax}{softmax}
\DeclareMathOperator*{\argmin}{argmin}
\DeclareMathOperator*{\argmax}{argmax}
\newcommand{\result}[1]{}\newcommand{\resultvalue}[1]{}\newcommand{\setting}[1]{}
\newcommand{\derived}[3]{}\newcommand{\citednumber}[2]{}\newcommand{\claim}[3]{}
\newcommand{\artifactfigure}[2]{\par #2\par}\newcommand{\artifacttable}[1]{}
\newcommand{\blind}[1][]{ #1 \blindnext}\newcommand{\blindnext}[2][]{ #1 }
\let\cite\blind\let\citep\blind\let\citet\blind\let\citealt\blind\let\citealp\blind
\let\citeauthor\blind\let\citeyear\blind
\renewcommand{\ref}[1]{}\renewcommand{\eqref}[1]{}\renewcommand{\pageref}[1]{}\newcommand{\autoref}[1]{}
\renewcommand{\thefigure}{}\renewcommand{\thetable}{}\renewcommand{\theequation}{}\renewcommand{\thefootnote}{}
\renewcommand{\theenumi}{}\renewcommand{\theenumii}{}\renewcommand{\theenumiii}{}\renewcommand{\theenumiv}{}
\renewcommand{\thesubsection}{}\renewcommand{\thesubsubsection}{}
\renewcommand{\_}{=}
\begin{document}
%s
\end{document}
"""
# An underscore is printed as a line, which no text holds; the page has an equals sign in its place.
_UNDERSCORE = re.compile(r"(?<=\w)=(?=\w)")


def unknown_digits(sections: Mapping[str, str], evidence: Evidence, cited: Mapping[str, Record]) -> list[str]:
    """Return, by section, what the PDF prints with digits that are no known name and no index of a formula.

    Raises:
        ConfigError: pypdf is not installed.
    """
    need_library("pypdf", "paper", "paper")
    pypdf: Any = importlib.import_module("pypdf")
    wrong: list[str] = []
    for section, body in sections.items():
        if not any(letter.isnumeric() for letter in body):
            continue
        compiled = compile_paper({"paper.tex": (_BLIND % body).encode()}, passes=1)
        if compiled.pdf is None:
            wrong.append(f"{section}: does not compile without its numbers:\n{compiled.error}")
            continue
        pages = pypdf.PdfReader(io.BytesIO(compiled.pdf)).pages
        scanned = check_section(section, body, evidence, cited, numbers_are_free=True).scanned
        names = section_names(scanned, evidence, cited)
        left: Counter[str] = Counter()
        shown: list[str] = []
        before = ""
        for word in " ".join(page.extract_text() for page in pages).split():
            plain = _UNDERSCORE.sub("_", word).strip(".,:;?!*()[]'\"")
            digits = [letter for letter in plain if letter.isnumeric()]
            if digits and not names.knows(plain, before):
                left.update(digits)
                shown.append(plain)
            before = plain
        structure = Counter(scanned.digits_of_formulas())
        if left - structure:
            wrong.append(
                f"{section}: the compiled page shows digits that no name or macro vouches for: {shown}"
            )
    return wrong
