"""Ceilings of what common actions pass, which may only fall; scripts/house.py counts and lowers them."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
ADVICE = "more than the ceiling in scripts/ceilings.json; list them: python scripts/walks.py"


@pytest.fixture(name="house")
def _house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("house")


@pytest.fixture(name="ceilings")
def _ceilings(house: ModuleType) -> dict[str, int]:
    return house.read_ceilings("house")


@pytest.mark.slow
@pytest.mark.parametrize("walk", ["training", "token", "generation", "decoding"])
def test_walk_passes_at_most_its_ceiling_of_files(walk: str, ceilings: dict[str, int]) -> None:
    command = [sys.executable, "scripts/walks.py", walk]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["count"] <= ceilings[f"walk: {walk}"], f"{ADVICE} {walk}\n{found['files']}"
    expected = {
        "training": "src/caramba/train/",
        "token": "src/caramba/lower/cpu_decode.py",
        "generation": "caramba",
        "decoding": "caramba.layer.attention",
    }
    assert any(file.startswith(expected[walk]) for file in found["files"]), found["files"]
    of_orchestrator = [file for file in found["files"] if "orchestrat" in file or "portfolio" in file]
    assert not of_orchestrator, "off by default: nothing of it is loaded"


def test_packages_count_at_most_their_ceiling(house: ModuleType, ceilings: dict[str, int]) -> None:
    assert 1 < house.count_packages() <= ceilings["packages"]


def test_imports_have_no_new_circle(house: ModuleType, ceilings: dict[str, int]) -> None:
    circles = house.find_circles(house.read_imports())
    assert len(circles) <= ceilings["import circles"], circles


def test_find_circles_two_groups_and_a_chain_returns_the_groups(house: ModuleType) -> None:
    imports = {
        **{"a": ["b", "x"], "b": ["c"], "c": ["a"]},
        **{"x": ["y"], "y": ["z"], "z": []},
        **{"p": ["q", "a"], "q": ["p"]},
    }
    assert house.find_circles(imports) == [["a", "b", "c"], ["p", "q"]]


def test_unknown_walk_ends_with_two() -> None:
    command = [sys.executable, "scripts/walks.py", "nowhere"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode == 2
