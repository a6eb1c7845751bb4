"""The scanner against LaTeX itself: no digit is printed that the scanner did not see."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from caramba.paper.latex import NotAllowed, scan
from caramba.paper.numbers import digits_of_formulas

pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")

PIECES = (
    *(
        "\\%",
        "\\%",
        "%",
        "\n",
        "\n",
        "\\\\",
        "\\\\%",
        "\\{",
        "\\}",
        "\\ ",
        "\\,",
        "~",
        " ",
        "\\&",
        "\\i",
        "\\'",
    ),
    *("1", "2", "7", "52.3", "x", "and", "{", "}", "{}", "\\emph{", "\\textbf{7", "\\mbox{", "\\item", "\\-"),
    *(
        "$",
        "$",
        "$x",
        "x^",
        "x_",
        "\\frac{1}{2}",
        "\\mathrm{7",
        "\\text{",
        "\\left(",
        "\\right)",
        "\\left.",
        "\\quad",
    ),
    *("\\(", "\\)", "\\[", "\\]", "\\begin{equation}", "\\end{equation}", "\\ldots", "\\S", "\\(", "\\)"),
    *("\\char53", "\\number7", "\\year", "\\today", "\\the", "\\number\\year"),
)
KNOWN = (
    "a \\% \\today\\number\\year 52.3\n, b",
    "a \\\\% 7\n1",
    "\\{7\\%7\n\\} 1",
    "$x\\%7\n$ 2",
    "5%\n  2",
    "$%\n7$",
)


def accepted(count: int) -> list[tuple[str, Counter[str]]]:
    """Return random bodies that the scanner takes, with the digits that it saw."""
    found: list[tuple[str, Counter[str]]] = []
    chance = random.Random(7)
    tried = list(KNOWN)
    while len(found) < count:
        body = tried.pop() if tried else "".join(chance.choices(PIECES, k=chance.randint(3, 9)))
        try:
            scanned = scan(body)
        except NotAllowed:
            continue
        texts = [letter for letter, _ in scanned.text]
        seen = Counter(letter for letter in [*texts, *digits_of_formulas(scanned.text)] if letter.isdigit())
        if seen or "%" in body or "\\" in body:
            found.append((body, seen))
    return found


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_prints_no_digit_that_the_scanner_did_not_see(tmp_path: Path) -> None:
    bodies = accepted(200)
    pages = "\n".join(f"BEGIN {body}\n\n\\clearpage" for body, _ in bodies)
    text = (
        "\\documentclass{article}\\usepackage{amsmath}\\pagestyle{empty}\\begin{document}\n"
        f"{pages}\n\\end{{document}}\n"
    )
    (tmp_path / "paper.tex").write_text(text)
    subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "paper.tex"],
        cwd=tmp_path, capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    pypdf = pytest.importorskip("pypdf", reason="the extra `paper` is not installed")
    text = "\n".join(page.extract_text() for page in pypdf.PdfReader(tmp_path / "paper.pdf").pages)
    printed = re.split("BEGIN", text)[1:]
    assert len(printed) == len(bodies)
    shown = [Counter(letter for letter in page if letter.isdigit()) for page in printed]
    assert sum(sum(digits.values()) for digits in shown) > 60
    for (body, seen), digits in zip(bodies, shown, strict=True):
        assert digits <= seen, body
