"""Packages that load their names on first use: every name is where its package says."""

from __future__ import annotations

import importlib
import pkgutil

import pytest

import caramba

LAZY = (
    "cache",
    "config",
    "config.estimate",
    "data",
    "data.checkpoint",
    "infer",
    "layer",
    "model",
    "model.topology",
    "runs",
    "runtime",
)


@pytest.mark.parametrize("package", LAZY)
def test_every_exported_name_loads(package: str) -> None:
    module = importlib.import_module(f"caramba.{package}")
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_the_list_of_lazy_packages_is_whole() -> None:
    found = {item.name for item in pkgutil.walk_packages(caramba.__path__, "caramba.") if item.ispkg}
    lazy = {
        name.removeprefix("caramba.")
        for name in found
        if getattr(getattr(importlib.import_module(name), "__getattr__", None), "__qualname__", "").startswith(
            "lazy_exports"
        )
    }
    assert lazy == set(LAZY)
