"""paper.tex: a preamble and an order that code writes, around sections that are written by a model or a person."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from caramba.artifacts.latex import escape
from caramba.config.paper import SECTIONS, PaperConfig, SectionName
from caramba.errors import ConfigError

TITLES: dict[SectionName, str] = {
    name: {"methodology": "Method"}.get(name, name.replace("_", " ").capitalize()) for name in SECTIONS
}

# Every file of these comes with texlive-latex-recommended.
STYLES = ("inputenc", "amsmath", "amssymb", "geometry", "graphicx", "booktabs", "natbib", "hyperref")

_PREAMBLE = r"""% Written by caramba. Edit below the heading of a section; `caramba paper RUN --update` keeps it.
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
    rf"^{re.escape(_OPEN)}(?P<name>[a-z_]+)\n(?P<heading>[^\n]*\n)(?P<body>.*?)(?P<end>\\end{{abstract}}\n)?^{re.escape(_CLOSE)}(?P=name)$",
    re.DOTALL | re.MULTILINE,
)


def build_paper(
    config: PaperConfig,
    default_title: str,
    note: str,
    sections: Mapping[str, str],
    *,
    has_citations: bool,
    appendix: str = "",
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
    if appendix:
        lines += ["", appendix]
    if has_citations:
        lines += ["", r"\bibliographystyle{plainnat}", r"\bibliography{references}"]
    return "\n".join([*lines, r"\end{document}", ""])


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


def outside_of_sections(text: str, common: Collection[str]) -> list[str]:
    """Return what code writes, to be compared with another text that has the sections `common` too.

    These are the lines outside of sections, and headings: of a section in `common` in place, of another only
    one that code would not write. Blank lines say nothing.
    """

    def kept(found: re.Match[str]) -> str:
        around = f"{found['heading']}{found['end'] or ''}"
        if found["name"] in common:
            return f"{_OPEN}{found['name']}\n{around}"
        return "" if around == "".join(_around(found["name"])) else around

    return [line.rstrip() for line in _SECTION.sub(kept, text).splitlines() if line.strip()]


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
