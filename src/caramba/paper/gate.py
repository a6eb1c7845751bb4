"""From sections to the files of a paper, through every check: what does not pass is not written.

Every number, citation, figure and reference that a section holds must be one that code knows.
"""

from __future__ import annotations

import importlib
import io
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from caramba.config.optional_deps import need_library
from caramba.config.paper import PaperConfig
from caramba.errors import CarambaError, need_name
from caramba.paper.compile import Compiled, compile_paper
from caramba.paper.document import PREAMBLE, build_paper, define, results_tex
from caramba.paper.evidence import Evidence, read_artifact
from caramba.paper.folder import BIBLIOGRAPHY, HUMAN, PAPER, PDF, RESULTS, Section
from caramba.paper.latex import NotAllowed, Scanned, Use, scan
from caramba.paper.literature import Record
from caramba.paper.numbers import Names, digits_of_formulas, find_wrong

Sections = Mapping[str, Section]
Cited = Mapping[str, Record]
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9:_-]*")
MOST = 12


def check_section(name: str, body: str, evidence: Evidence, cited: Cited, *, numbers_are_free: bool = False) -> Scanned:
    """Check one section against the run's evidence and the works that may be cited, by their keys.

    `numbers_are_free` is for a section that a person edited: its digits are the person's own.
    """
    try:
        scanned = scan(body)
    except NotAllowed as error:
        text, line = error.args
        return Scanned(problems=(f"{name}, line {line}: {text}",))
    problems: list[tuple[str, int]] = []
    for use in scanned.uses:
        try:
            _check_use(use, evidence, cited)
        except CarambaError as error:
            problems.append((str(error), use.line))
    if not numbers_are_free:
        problems += find_wrong(scanned.text, known_names([scanned], evidence, cited))
    scanned.problems = tuple(f"{name}, line {line}: {text}" for text, line in problems)
    return scanned


def _check_use(use: Use, evidence: Evidence, cited: Cited) -> None:
    """Refuse a use of a command that names what code does not know."""
    define(use, evidence)
    first, *others = use.arguments
    if use.command == "label" and not _LABEL.fullmatch(first):
        raise CarambaError(f"label {first!r}: expected letters, digits, : - and _, such as sec:setup")
    if use.command.startswith("cite"):
        for key in [first] if others else first.split(","):
            need_name(key.strip(), cited, "citation", "add_citation makes a key")
        if others and not cited[first].states(others[0]):
            raise CarambaError(f"{others[0]!r} does not stand in the abstract of {first}; quote a number that does")


def known_names(scanned: Sequence[Scanned], evidence: Evidence, cited: Cited) -> Names:
    """Return the words that may hold digits: of the manifest, and of titles of works that the sections cite."""
    titles = [cited[key].title for part in scanned for key in part.citation_keys() if key in cited]
    return Names([*evidence.names, evidence.name, *titles])


class Gate:
    """Checks and compiles sections against one run's evidence."""

    def __init__(self, config: PaperConfig, evidence: Evidence) -> None:
        self.config, self.evidence = config, evidence
        # What is adopted was compiled when it was written.
        self._last: tuple[Mapping[str, bytes], Compiled] | None = None

    def try_out(self, sections: Sections, cited: Cited) -> Compiled:
        """Check the sections and compile the paper that they make, in a folder that is thrown away."""
        scanned = [check_section(name, section.body, self.evidence, cited, numbers_are_free=section.by == HUMAN)
                   for name, section in sections.items()]  # fmt: skip
        uses = [use for part in scanned for use in part.uses]
        if found := [problem for part in scanned for problem in part.problems]:
            return Compiled(None, "\n".join([f"refused, {len(found)} problem(s):", *found[:MOST]]))
        keys = list(dict.fromkeys(key for part in scanned for key in part.citation_keys() if key in cited))
        bodies = {name: section.body for name, section in sections.items()}
        files = {
            PAPER: build_paper(self.config, self.evidence, bodies, has_citations=bool(keys)).encode(),
            RESULTS: results_tex(uses, self.evidence).encode(),
            BIBLIOGRAPHY: "\n".join(cited[key].bibtex() for key in keys).encode(),
        }
        try:
            for name in (use.arguments[0] for use in uses if use.command == "artifactfigure"):
                files[f"figures/{name}"] = read_artifact(*self.evidence.figures[name])
        except CarambaError as error:
            return Compiled(None, f"refused: {error}")
        for name in (use.arguments[0] for use in uses if use.command == "artifacttable"):
            files[f"tables/{name}.tex"] = self.evidence.tables[name].encode()
        if self._last is None or self._last[0] != files:
            self._last = files, compile_paper(files)
        compiled = self._last[1]
        if compiled.pdf is None:
            return Compiled(None, f"refused, the paper does not compile:\n{compiled.error}")
        return replace(compiled, files={**files, PDF: compiled.pdf})


# Every command that code fills prints nothing, as do counters and names; an underscore prints a sign that text holds.
_BLIND = r"""\pagestyle{empty}\raggedright\hyphenpenalty=10000\exhyphenpenalty=10000
\newcommand{\result}[1]{}\newcommand{\resultvalue}[1]{}\newcommand{\setting}[1]{}
\newcommand{\derived}[3]{}\newcommand{\citednumber}[2]{}\newcommand{\claim}[3]{}
\newcommand{\artifactfigure}[2]{\par #2\par}\newcommand{\artifacttable}[1]{}
\newcommand{\blind}[1][]{ #1 \blindnext}\newcommand{\blindnext}[2][]{ #1 }
\let\cite\blind\let\citep\blind\let\citet\blind\let\citealt\blind\let\citealp\blind
\let\citeauthor\blind\let\citeyear\blind
\renewcommand{\ref}[1]{}\renewcommand{\eqref}[1]{}\renewcommand{\pageref}[1]{}\renewcommand{\autoref}[1]{}
\renewcommand{\thefigure}{}\renewcommand{\thetable}{}\renewcommand{\theequation}{}\renewcommand{\thefootnote}{}
\renewcommand{\theenumi}{}\renewcommand{\theenumii}{}\renewcommand{\theenumiii}{}\renewcommand{\theenumiv}{}
\renewcommand{\thesubsection}{}\renewcommand{\thesubsubsection}{}
\renewcommand{\_}{=}
"""


def unknown_digits(bodies: Sequence[str], evidence: Evidence, cited: Cited) -> str | None:
    """Return the refusal of bodies whose PDF has digits that are no known name and no index of a formula.

    The independent check: it reads what LaTeX printed of a text without macros, not what the reader of `latex` saw.

    Raises:
        ConfigError: pypdf is not installed.
    """
    need_library("pypdf", "paper", "paper")
    pypdf: Any = importlib.import_module("pypdf")
    text = "\n\n\\clearpage\n".join(bodies)
    if not any(letter.isnumeric() for letter in text):
        return None
    compiled = compile_paper(
        {PAPER: f"{PREAMBLE}\\begin{{document}}\n{_BLIND}{text}\n\\end{{document}}\n".encode()}, passes=1
    )
    if compiled.pdf is None:
        return f"refused: the text does not compile without its numbers:\n{compiled.error}"
    scanned = [check_section("text", body, evidence, cited, numbers_are_free=True) for body in bodies]
    pages = "\n".join(page.extract_text() for page in pypdf.PdfReader(io.BytesIO(compiled.pdf)).pages)
    names = known_names(scanned, evidence, cited)
    shown = [word for word, _ in names.unknown_words(re.sub(r"(?<=\w)=(?=\w)", "_", pages))]
    vouched = Counter(digits_of_formulas([pair for part in scanned for pair in part.text]))
    if Counter(letter for word in shown for letter in word if letter.isnumeric()) - vouched:
        return f"refused: the compiled page shows digits that no name or macro vouches for: {shown}"
    return None
