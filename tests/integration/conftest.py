from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token cache for all tests: it is keyed by content, so sharing it is what a user gets."""
    folder = tmp_path_factory.mktemp("caramba_home")
    os.environ["CARAMBA_HOME"] = str(folder)
    return folder
