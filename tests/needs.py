"""Packages that a test module needs and that a person may not have installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest


def need(package: str) -> None:
    """Skip the module that is collected unless there is the package; `importorskip` would load it in every process."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
