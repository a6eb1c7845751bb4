"""results.tex: the macros by which a text names numbers, settings, figures and tables, and what each of them prints.

Only names that the text uses are defined, so a name that code does not know stops LaTeX as well as the gate.
"""

from __future__ import annotations

from collections.abc import Iterable

from caramba.artifacts.latex import escape, typeset
from caramba.artifacts.tables import number
from caramba.paper.check import derive
from caramba.paper.evidence import Evidence, unit_tex
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
    for key in _used(scanned, "result"):
        found = evidence.result(key)
        kind = "standard error" if found.is_standard_error else "dispersion"
        spread = "" if found.spread is None else f", {kind} {found.spread!r} of n={found.n}"
        lines.append(
            f"% {_comment(key)} = {found.value!r} {found.unit}{spread}, from {_comment(found.source)}"
        )
        lines.append(_define("result", key, found.tex + _mark(found.is_proxy)))
    for key in _used(scanned, "resultvalue"):
        found = evidence.result(key)
        lines.append(f"% {_comment(key)} = {found.value!r} {found.unit}, from {_comment(found.source)}")
        lines.append(_define("resultvalue", key, found.value_tex + _mark(found.is_proxy)))
    for operation, first, second in _used_derived(scanned):
        value = derive(operation, first, second, evidence)
        lines.append(f"% {operation} of {_comment(first)} and {_comment(second)} = {value!r}")
        one, other = evidence.result(first), evidence.result(second)
        unit = {"ratio": "", "difference": unit_tex(one.unit), "percent_change": r"\,\%"}[operation]
        shown = typeset(number(value)) + unit + _mark(one.is_proxy or other.is_proxy)
        lines.append(_define("derived", f"{operation} {first} {second}", shown))
    lines += [_define("setting", path, evidence.settings[path]) for path in _used(scanned, "setting")]
    return "\n".join([*lines, r"\makeatother", ""])


def provenance_note(evidence: Evidence) -> str:
    """Return the note under the title: the run, and what `proxy` means where numbers carry it."""
    note = rf"Drafted from run \texttt{{{escape(evidence.run_id)}}} of \texttt{{{escape(evidence.name)}}}."
    if evidence.proxy:
        note += rf" Numbers marked \emph{{proxy}} rest on a proxy teacher: {escape(evidence.proxy)}."
    return note


def figures_used(sections: Iterable[Scanned]) -> list[str]:
    """Return the names of the figures that the text shows."""
    return _used(list(sections), "artifactfigure")


def tables_used(sections: Iterable[Scanned]) -> list[str]:
    """Return the labels of the tables that the text shows."""
    return _used(list(sections), "artifacttable")


def _used(sections: list[Scanned], command: str) -> list[str]:
    return list(dict.fromkeys(use.arguments[0] for section in sections for use in section.uses_of(command)))


def _used_derived(sections: list[Scanned]) -> list[tuple[str, str, str]]:
    found = ((*use.arguments,) for section in sections for use in section.uses_of("derived"))
    return list(dict.fromkeys((one, two, three) for one, two, three in found))


def _define(kind: str, name: str, shown: str) -> str:
    return rf"\caramba@define{{{kind}}}{{{name}}}{{{shown}}}"


def _mark(is_proxy: bool) -> str:
    return PROXY_MARK if is_proxy else ""


def _comment(text: str) -> str:
    return " ".join(text.split())
