from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token cache for all tests: it is keyed by content, so sharing it is what a user gets."""
    folder = tmp_path_factory.mktemp("caramba_home")
    os.environ["CARAMBA_HOME"] = str(folder)
    return folder


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/bench/run.py, whose modules can be imported; the current folder is the repository's root."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    monkeypatch.chdir(ROOT)
    return importlib.import_module("run")
