"""What code writes of a paper: paper.tex around the sections of a model or a person, and results.tex.

results.tex holds the macros by which a text names numbers, settings, figures and tables, and what each prints. Only
names that the text uses are defined, so a name that code does not know stops LaTeX as well as the gate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from caramba.artifacts.latex import escape, typeset
from caramba.artifacts.tables import number
from caramba.config.paper import SECTIONS, PaperConfig
from caramba.errors import ConfigError, need_name
from caramba.paper.evidence import Evidence, unit_tex
from caramba.paper.latex import Use

TITLES: dict[str, str] = {
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
    rf"^{_OPEN}(?P<name>[a-z_]+)\n[^\n]*\n(?P<body>.*?)(?:\\end{{abstract}}\n)?^{_CLOSE}(?P=name)$",
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


def _section(name: str, body: str) -> str:
    heading = rf"\section{{{TITLES[name]}}}\label{{sec:{name}}}" + "\n"
    opening = {"abstract": "\\begin{abstract}\n", "appendix": rf"\appendix{heading}"}.get(name, heading)
    closing = "\\end{abstract}\n" if name == "abstract" else ""
    return f"{_OPEN}{name}\n{opening}{body.strip()}\n{closing}{_CLOSE}{name}"


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


def differs_in_bodies_alone(edited: Path, written: Path) -> bool:
    """Whether an edited paper.tex is the written one with other bodies, fewer sections, or other blank lines."""
    bodies = read_paper(edited)

    def replace_body(found: re.Match[str]) -> str:
        return _section(found["name"], bodies[found["name"]]) if found["name"] in bodies else ""

    texts = (edited.read_text(encoding="utf-8"), _SECTION.sub(replace_body, written.read_text(encoding="utf-8")))
    one, other = ([line.rstrip() for line in text.splitlines() if line.strip()] for text in texts)
    return one == other


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


def results_tex(uses: Iterable[Use], evidence: Evidence) -> str:
    """Return results.tex for the uses of sections that passed the gate."""
    definitions = dict.fromkeys(define(use, evidence) for use in uses)
    return "\n".join([
        f"% Numbers of run {_comment(evidence.run_id)}, written by code from report.json "
        f"({evidence.report_sha256[:12]}) and manifest.json ({evidence.manifest_sha256[:12]}).",
        _COMMANDS.rstrip(),
        rf"\newcommand{{\carambaproxy}}{{{' ' + PROXY_MARK if evidence.proxy else ''}}}",
        *filter(None, definitions),
        "\\makeatother\n",
    ])  # fmt: skip


def define(use: Use, evidence: Evidence) -> str:
    """Return the definition of what a use prints, after a comment with its source; empty where it prints no value.

    Raises:
        CarambaError: it names what the run does not have, or a claim that does not hold.
    """
    first, *others = use.arguments
    is_proxy = False
    match use.command:
        case "result" | "resultvalue":
            one = evidence.result(first)
            kind = "dispersion" if one.standard_error is None else "standard error"
            spread = "" if one.spread is None else f", {kind} {one.spread!r} of n={one.n}"
            shown, is_proxy = one.tex if use.command == "result" else one.value_tex, one.is_proxy
            source = f"{first} = {one.value!r} {one.unit}{spread}, from {one.source}"
        case "derived":
            value, keys = evidence.derive(first, *others), tuple(map(evidence.result, others))
            unit = {"ratio": "", "difference": unit_tex(keys[0].unit), "percent_change": r"\,\%"}[first]
            shown, is_proxy = typeset(number(value)) + unit, any(one.is_proxy for one in keys)
            source = f"{first} of {' and '.join(others)} = {value!r}"
        case "setting":
            need_name(first, evidence.settings, "setting", "get_experiment_manifest lists them")
            shown, source = evidence.settings[first], "manifest.json"
        case "claim":
            evidence.check_claim(first, *others)
            return ""
        case "artifactfigure" | "artifacttable":
            kind = use.command.removeprefix("artifact")
            need_name(
                first, evidence.figures if kind == "figure" else evidence.tables, kind, "list_artifacts lists them"
            )
            return ""
        case _:
            return ""
    mark = PROXY_MARK if is_proxy else ""
    return f"% {_comment(source)}\n\\caramba@define{{{use.command}}}{{{' '.join(use.arguments)}}}{{{shown}{mark}}}"


def _comment(text: str) -> str:
    return " ".join(text.split())
