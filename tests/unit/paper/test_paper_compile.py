"""pdflatex under limits: what it may read, how long it may take, and what its log says."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from caramba.errors import ConfigError
from caramba.paper.compile import compile_paper, need_latex

needs_latex = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")


def paper(body: str, preamble: str = "") -> dict[str, bytes]:
    text = f"\\documentclass{{article}}\n{preamble}\n\\begin{{document}}\n{body}\n\\end{{document}}\n"
    return {"paper.tex": text.encode()}


@needs_latex
def test_the_same_files_give_the_same_pdf() -> None:
    one = compile_paper(paper("Hello."))
    assert one.error is None
    assert one.pdf is not None
    assert one.pdf.startswith(b"%PDF")
    time.sleep(1.1)
    assert compile_paper(paper("Hello.")).pdf == one.pdf


@needs_latex
def test_errors_are_those_of_latex() -> None:
    found = compile_paper(paper(r"\nosuchcommand"))
    assert found.pdf is None
    assert "pdflatex failed (status 1)" in str(found.error)
    assert "Undefined control sequence" in str(found.error)
    assert "nosuchcommand" in str(found.error)


@needs_latex
def test_names_that_lead_nowhere_are_found_in_the_log() -> None:
    label = "sec:" + "a-long-name-" * 8  # TeX breaks its log at 79 characters
    found = compile_paper(
        paper(rf"See \ref{{{label}}} and \cite{{nobody}}. \label{{x}} \label{{x}}", r"\usepackage{natbib}")
    )
    assert found.pdf is not None
    assert found.undefined == (f"reference {label}", "citation nobody", "label x (defined twice)")


@needs_latex
@pytest.mark.parametrize(
    "body",
    [
        r"\input{/etc/passwd}",
        r"\input{../../../../../../etc/passwd}",
        r"\newread\f \openin\f=/etc/passwd \ifeof\f \nosuchfile \fi",
        r"\input{.hidden}",
    ],
)
def test_latex_reads_no_file_outside_its_folder(body: str) -> None:
    found = compile_paper({**paper(body), ".hidden": b"secret"})
    assert found.pdf is None


@needs_latex
def test_latex_writes_no_file_outside_and_runs_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("openout_any", "a")
    monkeypatch.setenv("shell_escape", "t")
    target = tmp_path / "written"
    written = compile_paper(paper(rf"x\newwrite\f \immediate\openout\f={target} \immediate\write\f{{x}}"))
    assert written.pdf is None
    compile_paper(paper(rf"x\immediate\write18{{touch {target}}}"))
    assert list(tmp_path.iterdir()) == []


@needs_latex
def test_a_text_that_loops_is_stopped() -> None:
    began = time.monotonic()
    found = compile_paper(paper(r"\def\x{\x}\x"), timeout_s=1.0)
    assert time.monotonic() - began < 60  # it never ends
    assert found.error == "pdflatex ran longer than 1 s; the text may loop"


@needs_latex
def test_latex_sees_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in pdflatex's place writes down what it is given."""
    fake = tmp_path / "bin" / "pdflatex"
    fake.parent.mkdir()
    fake.write_text(
        f"#!/bin/sh\nenv > {tmp_path}/seen\nulimit -t >> {tmp_path}/seen\nulimit -f >> {tmp_path}/seen\nexit 3\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert "status 3" in str(compile_paper(paper("x")).error)
    seen = (tmp_path / "seen").read_text()
    assert "sk-secret" not in seen
    assert "openin_any=p" in seen
    assert seen.splitlines()[-2:] == ["60", "200000"]


def test_a_machine_without_latex_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"paper: pdflatex, bibtex, kpsewhich not found.*texlive-latex-recommended"):
        need_latex("paper")
    for name in ("pdflatex", "bibtex", "kpsewhich"):
        (tmp_path / name).write_text("#!/bin/sh\necho /x/natbib.sty\n")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(ConfigError, match=r"inputenc\.sty, .*, plainnat\.bst not found"):
        need_latex("paper")
