"""Losses of the tiny recipes against those on record: a change of behaviour shows here first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.golden.recipes import LOSSES, RECIPES, is_comparable, run_recipes

TOLERANCE = 0.15
"""Relative, on another version of torch or another processor; on the recorded one nothing may differ.

Surgery decomposes matrices, and two processors differ by up to 12% in the gradient of a KL of 1e-4 after it.
"""


@pytest.fixture(scope="module", name="measured")
def _measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_recipes(tmp_path_factory.mktemp("golden"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_twenty_steps_gives_recorded_losses(recipe: str, measured: dict[str, Any]) -> None:
    golden = json.loads(LOSSES.read_text())
    recorded, found = golden["losses"][recipe], measured[recipe]
    if is_comparable(golden["recorded_on"]):
        assert found == recorded, "if the change is meant: python scripts/regenerate_golden.py"
        return
    assert found.keys() == recorded.keys()
    for step, values in recorded.items():
        assert found[step] == pytest.approx(values, rel=TOLERANCE, abs=1e-7), step


def test_losses_file_lists_every_recipe() -> None:
    assert list(json.loads(LOSSES.read_text())["losses"]) == list(RECIPES)
