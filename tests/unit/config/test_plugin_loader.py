"""Which modules are read from their source alone: a person's own, and no others that lie near them."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from caramba.config import plugins
from caramba.config.plugins import check_target, import_module
from caramba.errors import ConfigError


@pytest.fixture(name="own")
def _own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> plugins._OwnModules:
    (tmp_path / "mine_of_loader.py").write_text("")
    (tmp_path / "venv" / "theirs_of_loader").mkdir(parents=True)
    (tmp_path / "venv" / "theirs_of_loader" / "__init__.py").write_text("")
    (tmp_path / "theirs_of_loader").mkdir()  # such as the folder of logs that a package writes
    monkeypatch.setattr(sys, "path", [str(tmp_path / "venv"), str(tmp_path), *sys.path])
    own = plugins._OwnModules()
    own.folders.add(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [own, *sys.meta_path])
    return own


def test_an_environment_within_the_folder_keeps_its_bytecode(own: plugins._OwnModules) -> None:
    mine, theirs = (own.find_spec(f"{name}_of_loader", None) for name in ("mine", "theirs"))
    assert mine is not None
    assert theirs is not None
    assert type(mine.loader) is plugins._FromSource
    assert type(theirs.loader) is SourceFileLoader


def test_finders_of_old_are_passed_over(own: plugins._OwnModules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [own, object(), *sys.meta_path[1:]])
    assert own.find_spec("mine_of_loader", None) is not None
    own.tops.add("nothing_of_loader")
    assert own.find_spec("nothing_of_loader", None) is None


@pytest.mark.parametrize("name", ["time", "sys"])
def test_a_module_with_the_name_of_one_of_pythons_own_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=rf"has a {name}, and Python's own of the same name is loaded; rename"):
        import_module(name, None)


def test_the_package_of_a_target_is_read_from_source_and_an_installed_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nets_of_loader.py").write_text("class Net(Module): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_own", plugins._OwnModules())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    for target in ("nets_of_loader:Net", "numpy.polynomial:Polynomial"):
        schema: Any = type("AnyConfig", (), {"target": target})  # a layer's would be known from then on
        check_target(schema, "here")
    assert plugins._own.tops == {"nets_of_loader"}
