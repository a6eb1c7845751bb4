"""results.tex: the macros by which a text names numbers, settings, figures and tables, and what each of them prints.

Only names that the text uses are defined, so a name that code does not know stops LaTeX as well as the gate.
"""

from __future__ import annotations

from collections.abc import Iterable

from caramba.artifacts.latex import escape, typeset
from caramba.artifacts.tables import number
from caramba.paper.check import derive
from caramba.paper.evidence import Evidence, Result, unit_tex
from caramba.paper.latex import Scanned

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


def results_tex(sections: Iterable[Scanned], evidence: Evidence) -> str:
    """Return results.tex for sections that passed the gate, each definition after a comment with its source."""
    scanned = list(sections)
    lines = [
        f"% Numbers of run {_comment(evidence.run_id)}, written by code from report.json "
        f"({evidence.report_sha256[:12]}) and manifest.json ({evidence.manifest_sha256[:12]}).",
        _COMMANDS.rstrip(),
        rf"\newcommand{{\carambaproxy}}{{{' ' + PROXY_MARK if evidence.proxy else ''}}}",
    ]
    for key in list_names("result", scanned):
        found = evidence.result(key)
        kind = "standard error" if found.is_standard_error else "dispersion"
        spread = "" if found.spread is None else f", {kind} {found.spread!r} of n={found.n}"
        lines += _define("result", key, found.tex, found, spread)
    for key in list_names("resultvalue", scanned):
        lines += _define("resultvalue", key, evidence.result(key).value_tex, evidence.result(key))
    for use in dict.fromkeys(use.arguments for part in scanned for use in part.uses_of("derived")):
        operation, first, second = use
        value = derive(operation, first, second, evidence)
        lines.append(f"% {operation} of {_comment(first)} and {_comment(second)} = {value!r}")
        one, other = evidence.result(first), evidence.result(second)
        unit = {"ratio": "", "difference": unit_tex(one.unit), "percent_change": r"\,\%"}[operation]
        mark = PROXY_MARK if one.is_proxy or other.is_proxy else ""
        shown = typeset(number(value)) + unit + mark
        lines.append(rf"\caramba@define{{derived}}{{{operation} {first} {second}}}{{{shown}}}")
    lines += [
        rf"\caramba@define{{setting}}{{{path}}}{{{evidence.settings[path]}}}"
        for path in list_names("setting", scanned)
    ]
    return "\n".join([*lines, r"\makeatother", ""])


def provenance_note(evidence: Evidence) -> str:
    """Return the note under the title: the run, and what `proxy` means where numbers carry it."""
    note = rf"Drafted from run \texttt{{{escape(evidence.run_id)}}} of \texttt{{{escape(evidence.name)}}}."
    if evidence.proxy:
        note += rf" Numbers marked \emph{{proxy}} rest on a proxy teacher: {escape(evidence.proxy)}."
    return note


def list_names(command: str, sections: Iterable[Scanned]) -> list[str]:
    """Return what a command names in the sections, each once."""
    return list(dict.fromkeys(use.arguments[0] for part in sections for use in part.uses_of(command)))


def _define(command: str, key: str, shown: str, found: Result, spread: str = "") -> list[str]:
    """Return the definition of a result after a comment with its source."""
    mark = PROXY_MARK if found.is_proxy else ""
    return [
        f"% {_comment(key)} = {found.value!r} {found.unit}{spread}, from {_comment(found.source)}",
        rf"\caramba@define{{{command}}}{{{key}}}{{{shown}{mark}}}",
    ]


def _comment(text: str) -> str:
    return " ".join(text.split())
