"""What code writes of a paper: paper.tex around the sections of a model or a person, and results.tex.

results.tex holds the macros by which a text names numbers, settings, figures and tables, and what each prints. Only
names that the text uses are defined, so a name that code does not know stops LaTeX as well as the gate.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from caramba.artifacts.latex import escape, typeset
from caramba.artifacts.tables import number
from caramba.config.paper import SECTIONS, PaperConfig, SectionName
from caramba.errors import ConfigError
from caramba.paper.evidence import Evidence, unit_tex
from caramba.paper.latex import Scanned, list_names

TITLES: dict[SectionName, str] = {
    name: {"methodology": "Method"}.get(name, name.replace("_", " ").capitalize()) for name in SECTIONS
}

# Every file of these comes with texlive-latex-recommended.
STYLES = ("inputenc", "amsmath", "amssymb", "geometry", "graphicx", "booktabs", "natbib", "hyperref")

PREAMBLE = r"""% Written by caramba. Edit below the heading of a section; `caramba paper RUN --update` keeps it.
\documentclass[11pt]{article}
\usepackage[utf8]{inputenc}
\usepackage{amsmath,amssymb}
\usepackage[margin=1in]{geometry}
\usepackage{graphicx,booktabs}
\usepackage[numbers]{natbib}
\usepackage[hidelinks]{hyperref}
\DeclareMathOperator{\softmax}{softmax}
\DeclareMathOperator*{\argmin}{argmin}
\DeclareMathOperator*{\argmax}{argmax}
"""
_OPEN, _CLOSE = "% caramba:section ", "% caramba:end "
_SECTION = re.compile(
    rf"^{re.escape(_OPEN)}(?P<name>[a-z_]+)\n(?P<heading>[^\n]*\n)(?P<body>.*?)(?P<end>\\end{{abstract}}\n)?^{re.escape(_CLOSE)}(?P=name)$",
    re.DOTALL | re.MULTILINE,
)


def build_paper(config: PaperConfig, evidence: Evidence, sections: Mapping[str, str], *, has_citations: bool) -> str:
    """Return paper.tex. Sections that are not written yet are left out; a note names the run below the title."""
    note = rf"Drafted from run \texttt{{{escape(evidence.run_id)}}} of \texttt{{{escape(evidence.name)}}}."
    if evidence.proxy:
        note += rf" Numbers marked \emph{{proxy}} rest on a proxy teacher: {escape(evidence.proxy)}."
    written = [_section(name, sections[name]) for name in config.sections if name in sections]
    lines = [
        PREAMBLE + "\\input{results}\n",
        rf"\title{{{escape(config.title or evidence.name)}\thanks{{{note}}}}}",
        r"\author{" + r" \and ".join(map(escape, config.authors)) + "}",
        rf"\date{{{'Technical report' if config.paper_type == 'technical_report' else ''}}}",
        "\\begin{document}\n\\maketitle",
        *(f"\n{part}" for part in (*written, evidence.appendix) if part),
        *(["\n\\bibliographystyle{plainnat}\n\\bibliography{references}"] if has_citations else []),
        "\\end{document}\n",
    ]
    return "\n".join(lines)


def read_paper(file: Path) -> dict[str, str]:
    """Return the bodies of the sections of a paper.tex that a person may have edited.

    Raises:
        ConfigError: it is not UTF-8, or a mark of a section is missing or occurs twice.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 ({error}); save it as UTF-8") from None
    opened = [line.removeprefix(_OPEN).strip() for line in text.splitlines() if line.startswith(_OPEN)]
    found = {match["name"]: match["body"].rstrip("\n") for match in _SECTION.finditer(text)}
    if list(found) != opened or not found:
        wrong = next((name for name in opened if name not in found or opened.count(name) > 1), "any")
        raise ConfigError(
            f"{file}: the marks of section {wrong} are not whole; each begins with a line "
            f"'{_OPEN}NAME' and ends with '{_CLOSE}NAME'; put them back, or take the file from versions/"
        )
    return found


def outside_of_sections(file: Path, common: Collection[str]) -> list[str]:
    """Return what code writes in a paper.tex, to be compared with another one that has the sections `common` too.

    These are the lines outside of sections, and headings: of a section in `common` in place, of another only
    one that code would not write. Blank lines say nothing.
    """

    def kept(found: re.Match[str]) -> str:
        around = f"{found['heading']}{found['end'] or ''}"
        if found["name"] in common:
            return f"{_OPEN}{found['name']}\n{around}"
        return "" if around == "".join(_around(found["name"])) else around

    text = _SECTION.sub(kept, file.read_text(encoding="utf-8"))
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _around(name: str) -> tuple[str, str]:
    """Return the line before the body of a section and what follows it."""
    title = {**TITLES}.get(name, "")
    heading = rf"\section{{{title}}}\label{{sec:{name}}}"
    if name == "abstract":
        return "\\begin{abstract}\n", "\\end{abstract}\n"
    return (rf"\appendix{heading}" if name == "appendix" else heading) + "\n", ""


def _section(name: SectionName, body: str) -> str:
    opening, closing = _around(name)
    return f"{_OPEN}{name}\n{opening}{body.strip()}\n{closing}{_CLOSE}{name}"


PROXY_MARK = r"\textsuperscript{\emph{proxy}}"

_COMMANDS = r"""\makeatletter
\newcommand{\caramba@look}[2]{%
  \@ifundefined{caramba@#1@\detokenize{#2}}%
    {\PackageError{caramba}{no #1 is called \detokenize{#2}}{Name one of report.json or manifest.json.}}%
    {\ifmmode\text{\@nameuse{caramba@#1@\detokenize{#2}}}\else\@nameuse{caramba@#1@\detokenize{#2}}\fi}}
\newcommand{\caramba@define}[3]{\@namedef{caramba@#1@\detokenize{#2}}{#3}}
\DeclareRobustCommand{\result}[1]{\caramba@look{result}{#1}}
\DeclareRobustCommand{\resultvalue}[1]{\caramba@look{resultvalue}{#1}}
\DeclareRobustCommand{\setting}[1]{\caramba@look{setting}{#1}}
\DeclareRobustCommand{\derived}[3]{\caramba@look{derived}{#1 #2 #3}}
\DeclareRobustCommand{\claim}[3]{}
\DeclareRobustCommand{\citednumber}[2]{#2~\citep{#1}}
\newcommand{\artifactfigure}[2]{\begin{figure}[tb]\centering
  \includegraphics[width=\linewidth]{figures/\detokenize{#1}}%
  \caption{#2\carambaproxy}\label{fig:\detokenize{#1}}\end{figure}}
\newcommand{\artifacttable}[1]{\input{tables/\detokenize{#1}}}
"""


def results_tex(sections: Sequence[Scanned], evidence: Evidence) -> str:
    """Return results.tex for sections that passed the gate, each definition after a comment with its source."""
    lines = [
        f"% Numbers of run {_comment(evidence.run_id)}, written by code from report.json "
        f"({evidence.report_sha256[:12]}) and manifest.json ({evidence.manifest_sha256[:12]}).",
        _COMMANDS.rstrip(),
        rf"\newcommand{{\carambaproxy}}{{{' ' + PROXY_MARK if evidence.proxy else ''}}}",
    ]

    def define(command: str, name: str, shown: str, source: str = "", *, is_proxy: bool = False) -> None:
        mark = PROXY_MARK if is_proxy else ""
        lines.extend([f"% {_comment(source)}"] if source else [])
        lines.append(rf"\caramba@define{{{command}}}{{{name}}}{{{shown}{mark}}}")

    for command in ("result", "resultvalue"):
        for (key,) in list_names(command, sections):
            one = evidence.result(key)
            kind = "standard error" if one.is_standard_error else "dispersion"
            has_spread = command == "result" and one.spread is not None
            spread = f", {kind} {one.spread!r} of n={one.n}" if has_spread else ""
            source = f"{key} = {one.value!r} {one.unit}{spread}, from {one.source}"
            define(command, key, one.tex if command == "result" else one.value_tex, source, is_proxy=one.is_proxy)
    for operation, first, second in list_names("derived", sections):
        value, one, other = (
            evidence.derive(operation, first, second),
            evidence.result(first),
            evidence.result(second),
        )
        unit = {"ratio": "", "difference": unit_tex(one.unit), "percent_change": r"\,\%"}[operation]
        define(
            "derived", f"{operation} {first} {second}", typeset(number(value)) + unit,
            f"{operation} of {first} and {second} = {value!r}", is_proxy=one.is_proxy or other.is_proxy,
        )  # fmt: skip
    for (path,) in list_names("setting", sections):
        define("setting", path, evidence.settings[path])
    return "\n".join([*lines, r"\makeatother", ""])


def _comment(text: str) -> str:
    return " ".join(text.split())
