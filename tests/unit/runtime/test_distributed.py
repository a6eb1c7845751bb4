"""Ranks that a launcher started: a run refuses those that nothing joins."""

from __future__ import annotations

import pytest

from caramba.errors import ConfigError
from caramba.runtime import get_world_size, refuse_unconnected_ranks


def test_ranks_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    refuse_unconnected_ranks()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert get_world_size() == 2
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 and no process group joins the ranks"):
        refuse_unconnected_ranks()
