"""A cache folder of its own for every test, so that none reads what another left."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def forget_sums() -> Callable[[Path], Path]:
    """Return a function that makes a token folder one of a version that recorded no sums, and returns it."""

    def forget(folder: Path) -> Path:
        meta = json.loads((folder / "meta.json").read_text())
        del meta["checksums"]
        (folder / "meta.json").write_text(json.dumps(meta))
        (folder / "checksums.json").unlink()
        return folder

    return forget
