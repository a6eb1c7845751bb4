from __future__ import annotations

from pathlib import Path

import pytest

from caramba.data.corpus import collect_documents, stdlib_root
from caramba.errors import DataError


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "lib"
    for i in range(60):
        (root / f"pkg{i % 3}").mkdir(parents=True, exist_ok=True)
        (root / f"pkg{i % 3}" / f"m{i}.py").write_bytes(f"x = {i}\r\n".encode() * (i + 1))
    for folder in ("site-packages", "pkg0/__pycache__", "dist-packages"):
        (root / folder).mkdir()
        (root / folder / "skip.py").write_text("no")
    (root / "copy.py").write_bytes((root / "pkg0" / "m3.py").read_bytes())
    (root / "latin.py").write_bytes("x = 'é'".encode("latin-1"))
    (root / "empty.py").write_text("")
    (root / "data.txt").write_text("no")
    return root


def test_split_is_by_file_disjoint_and_complete(library: Path) -> None:
    documents = collect_documents(library, 0.3)
    assert not set(documents.train) & set(documents.val)
    names = {*documents.train, *documents.val}
    assert len(names) == 60
    assert len(names & {"copy.py", "pkg0/m3.py"}) == 1
    assert documents.duplicates == 1
    assert documents.not_utf8 == ("latin.py",)
    assert 8 <= len(documents.val) <= 28
    assert not set(documents.texts("train")) & set(documents.texts("val"))
    assert all("\r\n" in text for text in documents.texts("val"))


def test_order_and_split_depend_on_relative_paths_alone(library: Path, tmp_path: Path) -> None:
    first = collect_documents(library, 0.3)
    library.rename(tmp_path / "moved")
    second = collect_documents(tmp_path / "moved", 0.3)
    assert (first.train, first.val) == (second.train, second.val)
    assert list(first.train) != sorted(first.train)
    assert set(first.val) < set(collect_documents(tmp_path / "moved", 0.6).val)


@pytest.mark.parametrize("val_frac", [1e-9, 0.999999])
def test_neither_split_is_ever_empty(library: Path, val_frac: float) -> None:
    documents = collect_documents(library, val_frac)
    assert documents.train
    assert documents.val
    assert min(len(documents.train), len(documents.val)) == 1


def test_max_bytes_caps_the_corpus(library: Path) -> None:
    for limit in (700, 3000, 9000):
        documents = collect_documents(library, 0.3, limit)
        total = sum((library / name).stat().st_size for name in (*documents.train, *documents.val))
        assert limit / 2 < total <= limit
    with pytest.raises(DataError, match=r"0 usable \.py files within data\.max_bytes=3, expected at least 2"):
        collect_documents(library, 0.3, 3)


def test_an_interpreter_without_library_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"use data=tokens data\.path=FILE"):
        collect_documents(tmp_path, 0.1)


def test_the_running_interpreter_has_one() -> None:
    documents = collect_documents(stdlib_root(), 0.1, 500_000)
    assert len(documents.train) > 5
    assert not any("site-packages" in name for name in documents.train)
