"""Manifests of runs that earlier commits wrote are still read: older_manifests/COMMIT.json is one of a whole demo."""

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.runs import MANIFEST, read_manifest

OLDER = sorted(Path(__file__).with_name("older_manifests").glob("*.json"))


@pytest.mark.parametrize("file", OLDER, ids=lambda file: file.stem)
def test_a_manifest_of_an_earlier_commit_is_read(tmp_path: Path, file: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(file.read_bytes())
    manifest = read_manifest(tmp_path)
    assert [run.id for group in manifest.groups for run in group.runs][:2] == ["pretrain", "blockwise"]


def test_there_is_one() -> None:
    assert OLDER
