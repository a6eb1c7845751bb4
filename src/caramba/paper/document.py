"""paper.tex: a preamble and an order that code writes, around sections that are written by a model or a person."""

from __future__ import annotations

import re
from collections.abc import Mapping

from caramba.artifact.latex import escape
from caramba.config.paper import PaperConfig, SectionName
from caramba.errors import ConfigError

TITLES: dict[SectionName, str] = {
    "abstract": "Abstract",
    "introduction": "Introduction",
    "related_work": "Related work",
    "background": "Background",
    "methodology": "Method",
    "experiments": "Experiments",
    "results": "Results",
    "discussion": "Discussion",
    "limitations": "Limitations",
    "conclusion": "Conclusion",
    "appendix": "Appendix",
}

# Every file of these comes with texlive-latex-recommended.
STYLES = ("inputenc", "amsmath", "amssymb", "geometry", "graphicx", "booktabs", "natbib", "hyperref")

_PREAMBLE = r"""% Written by caramba. Edit between the marks of a section; `caramba paper RUN --update` keeps it.
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
\input{results}
"""
_OPEN, _CLOSE = "% caramba:section ", "% caramba:end "
_SECTION = re.compile(
    rf"^{re.escape(_OPEN)}(?P<name>[a-z_]+)\n(?:[^\n]*\n)(?P<body>.*?)(?:\\end{{abstract}}\n)?^{re.escape(_CLOSE)}(?P=name)$",
    re.DOTALL | re.MULTILINE,
)


def build_paper(
    config: PaperConfig, default_title: str, note: str, sections: Mapping[str, str], *, has_citations: bool
) -> str:
    """Return paper.tex. Sections that are not written yet are left out; `note` is TeX, for below the title."""
    authors = r" \and ".join(escape(name) for name in config.authors)
    kind = r"Technical report" if config.paper_type == "technical_report" else ""
    lines = [
        _PREAMBLE,
        rf"\title{{{escape(config.title or default_title)}\thanks{{{note}}}}}",
        rf"\author{{{authors}}}",
        rf"\date{{{kind}}}",
        r"\begin{document}",
        r"\maketitle",
    ]
    for name in config.sections:
        if name in sections:
            lines += ["", _section(name, sections[name])]
    if has_citations:
        lines += ["", r"\bibliographystyle{plainnat}", r"\bibliography{references}"]
    return "\n".join([*lines, r"\end{document}", ""])


def read_sections(text: str, where: str) -> dict[str, str]:
    """Return the bodies of the sections of a paper.tex that a person may have edited.

    Raises:
        ConfigError: a mark of a section is missing or stands twice; `where` is the file.
    """
    opened = [line.removeprefix(_OPEN).strip() for line in text.splitlines() if line.startswith(_OPEN)]
    found = {match["name"]: match["body"].rstrip("\n") for match in _SECTION.finditer(text)}
    wrong = next((name for name in opened if name not in found or opened.count(name) > 1), None)
    if wrong is not None or len(found) != len(opened) or not found:
        raise ConfigError(
            f"{where}: the marks of section {wrong or 'any'} are not whole; each begins with a line "
            f"'{_OPEN}NAME' and ends with '{_CLOSE}NAME'; put them back, or take the file from versions/"
        )
    return found


def outside_of_sections(text: str) -> str:
    """Return all but the sections: what code writes."""
    return _SECTION.sub(lambda found: found["name"], text)


def _section(name: SectionName, body: str) -> str:
    heading = rf"\section{{{TITLES[name]}}}\label{{sec:{name}}}"
    if name == "abstract":
        opening, closing = r"\begin{abstract}", "\\end{abstract}\n"
    else:
        opening, closing = (rf"\appendix{heading}" if name == "appendix" else heading), ""
    return f"{_OPEN}{name}\n{opening}\n{body.strip()}\n{closing}{_CLOSE}{name}"
