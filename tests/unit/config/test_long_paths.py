"""Paths that no file system holds are refused by key, before anything looks for them."""

from __future__ import annotations

import pytest

from caramba.errors import ConfigError
from caramba.launch.freeze import freeze

KEYS = ("data.path", "model.checkpoint", "model.teacher.checkpoint", "plan", "resume")


@pytest.mark.parametrize("path", ["x" * 256, "/".join(["x" * 200] * 21)], ids=["name", "path"])
@pytest.mark.parametrize("key", KEYS)
def test_path_too_long_for_a_file_system_is_refused_by_key(key: str, path: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: got a path of [\d,]+ characters"):
        freeze(["model=tiny_dba", "data=tokens", "data.path=corpus", f"{key}={path}"])
