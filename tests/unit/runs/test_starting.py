"""Imports without looking for garbage: the collector is off, then on again, and never where torch is loaded."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
import torch

from caramba.runs.exit_codes import imports_without_gc

CODE = """
import gc
from caramba.runs.exit_codes import imports_without_gc
try:
    with imports_without_gc():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print(gc.isenabled(), gc.get_freeze_count() > 1000)
"""


def test_nothing_is_collected_meanwhile_nor_what_was_loaded_later() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_where_torch_is_loaded_the_collector_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.__name__ in sys.modules
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("there may be garbage by now"))
    with imports_without_gc():
        assert gc.isenabled()
