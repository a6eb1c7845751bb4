"""Every benchmark case that runs on a CPU runs through run.py and writes a file that the page can be made of."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"

sys.path.insert(0, str(BENCH))
try:
    registry = importlib.import_module("registry")
finally:
    sys.path.remove(str(BENCH))


@pytest.mark.parametrize("name", registry.case_names())
def test_case_smoke_options_write_a_renderable_file(name: str, bench: ModuleType, tmp_path: Path) -> None:
    case = registry.load_case(name)
    if case.smoke is None:
        pytest.skip("needs devices, data or a test of its own")
    out = tmp_path / f"{name}.json"
    assert bench.main([name, *case.smoke, "--out", str(out)]) == 0
    data = json.loads(out.read_text())
    assert data["benchmark"] == name
    assert data["made_by"].startswith(f"python scripts/bench/run.py {name}")
    assert data["machine"]
    report = importlib.import_module("report")
    if report.has_section(name) and name != "decode":  # whose shares are of a GPU's read bandwidth
        assert report.section(name, data).startswith("## ")


@pytest.mark.parametrize("name", registry.case_names())
def test_case_help_names_its_options(
    name: str, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main([name, "--help"])
    assert ended.value.code == 0
    assert "--out" in capsys.readouterr().out


def test_unknown_case_ends_with_two_and_names_the_nearest(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["decod"]) == 2
    assert "did you mean 'decode'?" in capsys.readouterr().err


def test_interleave_turns_and_warm_up_keep_the_order(bench: ModuleType) -> None:
    timing = importlib.import_module("timing")
    order: list[str] = []
    sides = {name: lambda name=name: float(len(order.append(name) or order)) for name in "ab"}
    assert timing.interleave(sides, repeats=2, warm=1) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert order == ["a", "b"] * 3


def test_spread_of_ten_values_is_median_and_middle_60_percent(bench: ModuleType) -> None:
    timing = importlib.import_module("timing")
    found = timing.spread([n / 1000 for n in range(10)])
    assert found == pytest.approx({"median_ms": 4.5, "p20_ms": 2.0, "p80_ms": 7.0})
