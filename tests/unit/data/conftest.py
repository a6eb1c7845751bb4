"""A cache folder of its own for every test, so that none reads what another left."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"
