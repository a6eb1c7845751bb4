"""The independent check: what LaTeX prints where every macro prints nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from caramba.paper.evidence import Evidence
from caramba.paper.gate import unknown_digits
from caramba.paper.literature import Record

pytest.importorskip("pypdf", reason="the extra `paper` is not installed")
pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")
pytestmark = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")

CITED = {
    "author2017llama": Record("arxiv:1", "Llama 3.2 and GPT-4 with 5.3x less", ("A. Author",), "2017"),
    "a2017x": Record("arxiv:1", "A title", ("A B",), "2017"),
}


def test_pages_of_honest_drafts_show_no_unknown_digit(evidence: Evidence) -> None:
    honest = json.loads(Path(__file__).with_name("corpus.json").read_text())["honest"]
    bodies = [body for body in honest if "tabular}{lr}" not in body]  # it has more cells than columns
    assert unknown_digits(bodies, evidence, CITED) is None


@pytest.mark.parametrize(
    "body",
    [
        "It is 52.05.",
        r"a \emph{4}\emph{2}",
        r"\the\numexpr 40+2\relax",
        r"\char53\char50",
        r"\csname char\endcsname 53 ",
    ],
)
def test_a_digit_that_a_page_prints_is_found(body: str, evidence: Evidence) -> None:
    assert unknown_digits([body], evidence, CITED) is not None
