"""tables.tex: booktabs tables in which every number names its metric key in a comment on its line."""

from __future__ import annotations

import re
import unicodedata

from caramba.artifacts.tables import NOTHING, TIMES, WORDS, Cell, Table, list_tables
from caramba.result import Metric, RunResult

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "↓": r"$\downarrow$",
    "↑": r"$\uparrow$",
    **{sign: "\\" + sign for sign in "&%$#_{}"},
}
# What a number's text is made of besides digits and points.
_SIGNS = {
    ",": "{,}",
    "-": "$-$",
    TIMES: r"$\times$",
    "±": r"$\pm$",
    "≤": r"$\le$",
    "≥": r"$\ge$",
    "\u00a0": "~",
}
_HEADER = """\
% Tables of run {name}. Needs \\usepackage{{booktabs}}.
% Each row ends with the keys of its numbers in report.json's "metrics", in the order of the cells;
% a plus-minus precedes the std or standard_error of the same key, KEY#bound is the bound of that check under
% "verify", a key that begins with "transplant" or "phases" is a path in report.json, and a dash is no number.
"""


def build_tables(result: RunResult, metrics: dict[str, Metric]) -> str | None:
    """Return the tables that have rows, or None when none has."""
    tables = [_table(table) for table in list_tables(result, metrics)]
    return "\n".join([_HEADER.format(name=_comment(result.name)), *tables]) if tables else None


def escape(text: str) -> str:
    """Return text that pdflatex prints as written: specials escaped, characters it has no glyph for by code point."""
    out: list[str] = []
    for letter in unicodedata.normalize("NFC", text):
        if letter in _SPECIAL:
            out.append(_SPECIAL[letter])
        elif letter.isspace():
            out.append(" ")
        elif " " <= letter <= "~" or ("\u00c0" <= letter <= "\u00ff" and letter not in "\u00d7\u00f7"):
            out.append(letter)
        elif unicodedata.category(letter) != "Cc":
            out.append(f"[U+{ord(letter):04X}]")
    # Two hyphens in a row would print as one dash.
    return re.sub(r"-(?=-)", "-{}", "".join(out))


def typeset(number: str) -> str:
    """Return a number as `tables.number` writes it, with its signs and exponent in math."""

    def replace_macro(found: re.Match[str]) -> str:
        mantissa, exponent = found["mantissa"], found["exponent"]
        return rf"${mantissa}\times10^{{{int(exponent)}}}$" if mantissa else _SIGNS[found[0]]

    return re.sub(_NUMBER_PARTS, replace_macro, number)


_NUMBER_PARTS = rf"(?P<mantissa>-?[\d.]+)e(?P<exponent>[+-]\d+)|[{re.escape(''.join(_SIGNS))}]"


def _table(table: Table) -> str:
    columns = "".join("l" if name in WORDS else "r" for name in table.head)
    caption = rf"{escape(table.before)}\texttt{{{escape(table.name)}}}{escape(table.after)}"
    lines = [
        r"\begin{table}[t]",
        r"  \centering",
        rf"  \caption{{{caption}}}",
        rf"  \label{{tab:caramba-{table.label}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        f"    {' & '.join(table.head)} \\\\",
        r"    \midrule",
        *(_row(row) for row in table.rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _row(cells: list[Cell]) -> str:
    keys = " | ".join(cell.key or "-" for cell in cells)
    return f"    {' & '.join(map(_cell, cells))} \\\\ % {_comment(keys)}"


def _cell(cell: Cell) -> str:
    if cell == Cell(NOTHING):
        return "--"
    text = typeset(cell.text) if cell.is_number else escape(cell.text)
    text = rf"\texttt{{{text}}}" if cell.is_code else text
    return rf"\textbf{{{text}}}" if cell.is_bold else text


def _comment(text: str) -> str:
    """Return text on one line: a line break would end the comment."""
    return " ".join(text.split())
