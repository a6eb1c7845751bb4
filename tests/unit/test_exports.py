"""Packages whose names load on first use: each name is found, and none is hidden by a module."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from caramba.exports import lazy_exports

SOURCES = Path(__file__).parents[2] / "src"
PACKAGES = sorted(
    ".".join(file.parent.relative_to(SOURCES).parts)
    for file in SOURCES.rglob("__init__.py")
    if "__getattr__ = lazy_exports(" in file.read_text()
)


@pytest.mark.parametrize("name", PACKAGES)
def test_lazy_package_finds_every_name_it_exports(name: str) -> None:
    package = importlib.import_module(name)
    assert all(getattr(package, exported) is not None for exported in package.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_lazy_package_exports_no_name_of_its_modules(name: str) -> None:
    package = importlib.import_module(name)
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    known = {"caramba.runs": {"environment"}}  # its module is imported through the package alone
    assert modules.isdisjoint(set(package.__all__) - known.get(name, set()))


def test_lazy_exports_unknown_name_raises() -> None:
    with pytest.raises(AttributeError, match="module 'caramba\\.infer' has no attribute 'nothing'"):
        lazy_exports("caramba.infer", {"decode": ("greedy",)})("nothing")


def test_packages_that_are_lazy_are_more_than_five() -> None:
    assert {"caramba.infer", "caramba.layer", "caramba.model", "caramba.cache"} <= set(PACKAGES)


def test_schema_of_a_model_knows_layers_alone() -> None:
    """The types of layers are registered by whoever imports the schema of a model, without torch."""
    program = (
        "import sys; from caramba.config.model import ModelConfig; from caramba.config.node import NodeConfig; "
        "assert {'AttentionLayer', 'RMSNormLayer'} <= set(NodeConfig.registry); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
