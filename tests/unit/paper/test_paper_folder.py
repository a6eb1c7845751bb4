"""The folder of a paper: nothing outside it, no half version, whatever stops the writer."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from caramba.errors import ConfigError
from caramba.paper import folder as module
from caramba.paper.folder import Draft, PaperFolder, Section, load_draft
from caramba.paper.literature import Record
from caramba.runs.files import sha256_of

FACTS = {"report_sha256": "ab", "sections": {}}


def files(text: str) -> dict[str, bytes]:
    return {
        "results.tex": f"r{text}".encode(),
        "figures/a.png": b"png" + text.encode(),
        "paper.tex": text.encode(),
    }


def opened(root: Path) -> PaperFolder:
    root.mkdir(exist_ok=True)
    return PaperFolder(root)


def test_a_link_in_place_of_a_folder_is_not_written_through(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    (tmp_path / "outside").mkdir()
    (paper.root / "figures").symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match="leads out of the paper's folder"):
        paper.adopt(files("one"), FACTS, None)
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(
        ConfigError, match=r"no version of a paper by caramba in versions/.*; put versions/ back, or name a new folder"
    ):
        PaperFolder(tmp_path)
    with pytest.raises(ConfigError, match="a file; name a folder"):
        PaperFolder(tmp_path / "thesis.tex")


def test_versions_are_kept_and_the_newest_is_the_head(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    assert paper.head() is None
    assert [paper.adopt(files(text), FACTS, None) for text in ("one", "two")] == [1, 2]
    assert paper.adopt(files("two"), FACTS, None) == 2  # the same again is no new version
    assert (paper.root / "paper.tex").read_text() == "two"
    assert (paper.root / "versions/001/figures/a.png").read_bytes() == b"pngone"
    head = paper.head()
    assert head is not None
    assert (head["version"], set(head["files"])) == (2, set(files("two")))
    assert paper.adopt(files("three"), FACTS, 2) == 3
    assert paper.versions() == [2, 3]


class Killed(BaseException):
    """Stands for a kill: no handler of errors takes it."""


@pytest.mark.parametrize("n_writes", range(9))
def test_a_kill_at_any_write_leaves_a_whole_version(
    n_writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adopting makes eight writes: three and a record in the version, three in the head, and that they are there."""
    paper = opened(tmp_path / "paper")
    paper.adopt(files("one"), FACTS, None)
    left = n_writes
    write, record = module.write_whole, module.write_json

    def counted(real):
        def call(*arguments):
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            real(*arguments)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_whole", counted(write))
        patch.setattr(module, "write_json", counted(record))
        try:
            assert paper.adopt(files("two"), FACTS, None) == 2
            assert n_writes == 8
        except Killed:
            assert n_writes < 8
    again = PaperFolder(paper.root)
    again.heal()
    newest = "two" if n_writes >= 4 else "one"
    assert {name: (paper.root / name).read_bytes() for name in files("")} == files(newest)
    assert len(again.versions()) == (2 if n_writes >= 4 else 1)


def test_an_older_version_that_a_person_put_back_is_an_edit(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    paper.adopt(files("one"), FACTS, None)
    paper.adopt(files("two"), FACTS, None)
    (paper.root / "paper.tex").write_text("one")
    paper.heal()
    assert (paper.root / "paper.tex").read_text() == "one"


def test_a_missing_head_is_put_back_and_an_edited_one_is_not(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    paper.adopt(files("one"), FACTS, None)
    (paper.root / "paper.tex").write_text("edited")
    paper.heal()
    assert (paper.root / "paper.tex").read_text() == "edited"
    (paper.root / "paper.tex").unlink()
    paper.heal()
    assert (paper.root / "paper.tex").read_text() == "one"


def test_a_draft_is_read_back(tmp_path: Path) -> None:
    draft = Draft(run_id="r")
    draft.sections["abstract"] = Section("text", "human")
    draft.records["arxiv:1"] = Record("arxiv:1", "T", ("A", "B"), "2020")
    draft.cited.append("arxiv:1")
    draft.spent.prompt_tokens = 7
    paper = opened(tmp_path / "paper")
    assert load_draft(paper) == Draft()
    paper.adopt(files("one"), asdict(draft), None)
    assert load_draft(paper) == draft  # as its version has it
    draft.spent.prompt_tokens = 8
    draft.save(paper.draft_file)
    assert load_draft(paper) == draft
    for text in ("{", "[]", '{"sections": {"a": {}}}'):
        paper.draft_file.write_text(text)
        with pytest.raises(ConfigError, match=r"draft\.json: not the state of a draft .*; remove it to resume"):
            load_draft(paper)


def test_a_version_of_an_earlier_caramba_is_named(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    paper.adopt(files("one"), {**FACTS, "sections": {"a": {}}}, None)
    with pytest.raises(
        ConfigError, match=r"version\.json: not the state .*; it is of an earlier caramba: name a new folder"
    ):
        load_draft(paper)


def test_versions_are_readable_by_others(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    paper.adopt(files("one"), FACTS, None)
    assert os.stat(paper.version_path(1)).st_mode & 0o777 == 0o755


def test_a_paper_of_ones_own_is_left_alone(tmp_path: Path) -> None:
    """A paper.tex is no sign of caramba's: only a draft or a version is."""
    for name in ("paper.tex", "references.bib"):
        (tmp_path / name).write_text("mine")
    for beside in ({}, {"draft.json": "{}"}, {"versions/1": None}, {"versions/notes.txt": "x"}):
        for name, content in beside.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=r"no version of a paper by caramba in versions/"):
            PaperFolder(tmp_path)


def test_what_a_stopped_draft_left_is_as_good_as_new(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".draft.json.a.part").write_text("{")
    assert PaperFolder(tmp_path).head() is None
    Draft().save(tmp_path / "draft.json")
    assert PaperFolder(tmp_path).head() is None


def test_an_edit_whose_versions_were_removed_is_not_overwritten(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    paper.adopt(files("one"), FACTS, None)
    Draft().save(paper.draft_file)
    (paper.root / "versions/001/version.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"version\.json: cannot be read, or .*remove its folder"):
        PaperFolder(paper.root)
    shutil.rmtree(paper.root / "versions")
    with pytest.raises(ConfigError, match=r"no version of a paper by caramba in versions/"):
        PaperFolder(paper.root)
    (paper.root / "paper.tex").unlink()
    assert PaperFolder(paper.root).head() is None


def test_a_file_that_a_person_changed_is_kept_beside_the_new_one(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    paper.adopt(files("one"), FACTS, None)
    (paper.root / "results.tex").write_text("mine")
    (paper.root / "paper.tex").write_text("saved in the last moment")
    paper.adopt(files("two"), FACTS, None)
    (paper.root / "results.tex").write_text("mine again")
    (paper.root / "paper.tex").write_text("taken")
    paper.adopt(files("three"), {**FACTS, "taken_sha256": sha256_of(paper.root / "paper.tex")}, None)
    paper.adopt(files("three"), FACTS, None)
    assert {name: (paper.root / name).read_bytes() for name in files("")} == files("three")
    kept = {item.name: item.read_text() for item in paper.root.glob("*.edited-*")}
    assert kept == {
        "results.tex.edited-1": "mine",
        "paper.tex.edited-1": "saved in the last moment",
        "results.tex.edited-2": "mine again",
    }


def test_files_that_were_there_before_the_first_version_are_kept(tmp_path: Path) -> None:
    paper = opened(tmp_path / "paper")
    (paper.root / "paper.tex").write_text("written while the first draft ran")
    (paper.root / "results.tex").mkdir()
    (paper.root / "results.tex/deep").write_text("x")
    paper.adopt(files("one"), FACTS, None)
    assert (paper.root / "paper.tex.edited-1").read_text() == "written while the first draft ran"
    assert (paper.root / "results.tex.edited-1/deep").read_text() == "x"
    assert {name: (paper.root / name).read_bytes() for name in files("")} == files("one")
