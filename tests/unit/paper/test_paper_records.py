"""Records and their BibTeX: what others wrote is printed as text, and a user's own entries as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.errors import ConfigError
from caramba.paper.literature import Record, read_bibliography
from caramba.paper.untrusted import clean


def test_titles_of_others_cannot_leave_their_field() -> None:
    record = Record("s2:1", r"A }, note={x} \input{y} 50% & #1", ("Eve", "Smith, J. and others"), "2024", venue="V_1")
    entry = record.bibtex()
    assert entry.count("{") == entry.count("}")
    assert r"\textbackslash" in entry
    assert r"\input" not in entry
    assert r"50\% \& \#1" in entry
    assert r"author = {Eve and {Smith, J. and others}}" in entry


def test_hidden_characters_are_taken_out() -> None:
    assert clean("a\u200b\u202eb\x00 \n c\t d", 99) == "ab c d"
    assert clean("x" * 50, 10) == "x" * 9 + "\u2026"


def test_a_users_bibliography_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.bib"
    file.write_text(
        '@comment{ignored}\n@article{Smith:2020,\n title = {A {Nested} Title},\n author = "Ann Smith and Bo Li",\n'
        " year = 2020,\n abstract={We reach 91.3 points.}}\n\n@misc{b, title={Second}}\n"
    )
    found = read_bibliography(file)
    assert list(found) == ["bib:Smith:2020", "bib:b"]
    smith = found["bib:Smith:2020"]
    assert (smith.title, smith.year) == ("A Nested Title", "2020")
    assert smith.states("91.3")
    assert not smith.states("1.3")
    assert smith.key == "Smith:2020"
    assert smith.bibtex().startswith("@article{Smith:2020,")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("@article{a, title={x}", r"mine\.bib: not BibTeX: .*line 1: premature end"),
        ("\n@article{a b, title={x}}", r"mine\.bib: not BibTeX: .*line 2"),
        ("@misc{a, title={x}}\n@misc{a, title={y}}", r"mine\.bib: not BibTeX: repeated .*: a"),
    ],
)
def test_a_broken_bibliography_is_a_clear_error(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.bib").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_bibliography(tmp_path / "mine.bib")
    with pytest.raises(ConfigError, match="cannot read the bibliography"):
        read_bibliography(tmp_path / "other.bib")
