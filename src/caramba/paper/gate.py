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
from caramba.errors import CarambaError
from caramba.paper.compile import Compiled, compile_paper
from caramba.paper.document import PREAMBLE, build_paper, results_tex
from caramba.paper.evidence import Evidence, need_name, read_artifact
from caramba.paper.folder import BIBLIOGRAPHY, HUMAN, PAPER, PDF, RESULTS, Section
from caramba.paper.latex import NotAllowed, Scanned, Use, list_names, scan
from caramba.paper.literature import Record
from caramba.paper.numbers import Found, Names, find_wrong

Sections = Mapping[str, Section]
Cited = Mapping[str, Record]
_LABEL = re.compile(r"[A-Za-z][A-Za-z0-9:_-]*")
MOST = 12


def check_section(
    name: str, body: str, evidence: Evidence, cited: Mapping[str, Record], *, numbers_are_free: bool = False
) -> Scanned:
    """Check one section against the run's evidence and the works that may be cited, by their keys.

    `numbers_are_free` is for a section that a person edited: its digits are the person's own.
    """
    try:
        scanned = scan(body)
    except NotAllowed as error:
        return Scanned(problems=(f"{name}, line {error.line}: {error.text}",))
    problems: list[Found] = []
    for use in scanned.uses:
        try:
            _check_use(use, evidence, cited)
        except CarambaError as error:
            problems.append((str(error), use.line))
    if not numbers_are_free:
        problems += [*scanned.wrong, *find_wrong(scanned.text, section_names(scanned, evidence, cited))]
    scanned.problems = tuple(f"{name}, line {line}: {text}" for text, line in problems)
    return scanned


def report(problems: Sequence[str]) -> str:
    """Return problems as text for the model or a person."""
    more = [f"… and {len(problems) - MOST} more"] if len(problems) > MOST else []
    return "\n".join([*problems[:MOST], *more])


def _check_use(use: Use, evidence: Evidence, cited: Mapping[str, Record]) -> None:
    """Refuse a use of a command that names what code does not know."""
    first, *others = use.arguments
    match use.command:
        case "result" | "resultvalue":
            evidence.result(first)
        case "derived":
            evidence.derive(first, *others)
        case "claim":
            evidence.check_claim(first, *others)
        case "setting":
            need_name(first, evidence.settings, "setting", "get_experiment_manifest lists them")
        case "artifactfigure":
            need_name(first, evidence.figures, "figure", "list_artifacts lists them")
        case "artifacttable":
            need_name(first, evidence.tables, "table", "list_artifacts lists them")
        case "label":
            if not _LABEL.fullmatch(first):
                raise CarambaError(f"label {first!r}: expected letters, digits, : - and _, such as sec:setup")
        case command if command.startswith("cite"):
            keys = first.split(",") if command != "citednumber" else [first]
            for key in map(str.strip, keys):
                need_name(key, cited, "citation", "add_citation makes a key")
            if others and not cited[first].states(others[0]):
                raise CarambaError(f"{others[0]!r} does not stand in the abstract of {first}; quote a number that does")
        case _:
            pass


def section_names(scanned: Scanned, evidence: Evidence, cited: Mapping[str, Record]) -> Names:
    """Return the words of a section that may hold digits: of the manifest, and of titles of works that it cites."""
    titles = [cited[key].title for key in scanned.citation_keys() if key in cited]
    return Names([*evidence.names, evidence.name, *titles])


class Gate:
    """Checks and compiles sections against one run's evidence."""

    def __init__(self, config: PaperConfig, evidence: Evidence) -> None:
        self.config, self.evidence = config, evidence
        # What is adopted was compiled when it was written.
        self._last: tuple[Mapping[str, bytes], Compiled] | None = None

    def problems(self, sections: Sections, cited: Cited) -> list[str]:
        """Return what the checks find in the sections, without compiling them."""
        return [problem for scanned in self._check(sections, cited) for problem in scanned.problems]

    def _check(self, sections: Sections, cited: Cited) -> list[Scanned]:
        return [check_section(name, section.body, self.evidence, cited, numbers_are_free=section.by == HUMAN)
                for name, section in sections.items()]  # fmt: skip

    def unknown_digits(self, sections: Sections, cited: Cited) -> str | None:
        """Return the refusal of the independent check on what the model wrote, None when it passes."""
        theirs = {name: section.body for name, section in sections.items() if section.by != HUMAN}
        wrong = unknown_digits(theirs, self.evidence, cited)
        return "refused:\n" + "\n".join(wrong) if wrong else None

    def try_out(self, sections: Sections, cited: Cited) -> Compiled:
        """Check the sections and compile the paper that they make, in a folder that is thrown away."""
        scanned = self._check(sections, cited)
        if found := [problem for part in scanned for problem in part.problems]:
            return Compiled(None, f"refused, {len(found)} problem(s):\n{report(found)}")
        keys = list(dict.fromkeys(key for part in scanned for key in part.citation_keys() if key in cited))
        bodies = {name: section.body for name, section in sections.items()}
        try:
            figures = {f"figures/{name}": read_artifact(*self.evidence.figures[name])
                       for (name,) in list_names("artifactfigure", scanned)}  # fmt: skip
        except CarambaError as error:
            return Compiled(None, f"refused: {error}")
        files = {
            PAPER: build_paper(self.config, self.evidence, bodies, has_citations=bool(keys)).encode(),
            RESULTS: results_tex(scanned, self.evidence).encode(),
            BIBLIOGRAPHY: "\n".join(cited[key].bibtex(key) for key in keys).encode(),
            **figures,
            **{f"tables/{name}.tex": self.evidence.tables[name].encode()
               for (name,) in list_names("artifacttable", scanned)},
        }  # fmt: skip
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


def unknown_digits(sections: Mapping[str, str], evidence: Evidence, cited: Cited) -> list[str]:
    """Return, by section, what the PDF prints with digits that are no known name and no index of a formula.

    The independent check: it reads what LaTeX printed of a text without macros, not what the reader of `latex` saw.

    Raises:
        ConfigError: pypdf is not installed.
    """
    need_library("pypdf", "paper", "paper")
    pypdf: Any = importlib.import_module("pypdf")
    wrong: list[str] = []
    for section, body in sections.items():
        if not any(letter.isnumeric() for letter in body):
            continue
        text = f"{PREAMBLE}\\begin{{document}}\n{_BLIND}{body}\n\\end{{document}}\n"
        compiled = compile_paper({PAPER: text.encode()}, passes=1)
        if compiled.pdf is None:
            wrong.append(f"{section}: does not compile without its numbers:\n{compiled.error}")
            continue
        scanned = check_section(section, body, evidence, cited, numbers_are_free=True)
        names, before = section_names(scanned, evidence, cited), ""
        shown: list[str] = []
        for word in " ".join(page.extract_text() for page in pypdf.PdfReader(io.BytesIO(compiled.pdf)).pages).split():
            plain = re.sub(r"(?<=\w)=(?=\w)", "_", word).strip(".,:;?!*()[]'\"")
            if any(letter.isnumeric() for letter in plain) and not names.knows(plain, before):
                shown.append(plain)
            before = plain
        if Counter(letter for word in shown for letter in word if letter.isnumeric()) - Counter(scanned.digits):
            wrong.append(f"{section}: the compiled page shows digits that no name or macro vouches for: {shown}")
    return wrong
