"""What the benchmarks page says of scaling: shares of linear by the best settings, losses that must agree, sittings."""

from __future__ import annotations

import copy
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from caramba.runs.files import write_json

MUST = {"ddp": 0.93, "fsdp2": 0.9, "losses_within": 5e-3}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Scripts are no package: their modules are found while a test runs, and forgotten."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts" / "bench"))
    names = ("merge_runs", "verdicts", "plots", "report")
    modules = {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name)
    return modules


def row(strategy: str, devices: int, speed: float, losses: list[float], **settings: int) -> dict[str, Any]:
    found = {"strategy": strategy, "devices": devices, "tokens_per_s": speed, "losses": losses}
    return {**found, "compiled": True, "settings": settings}


def file(folder: Path, name: str, commit: str | None, rows: list[dict[str, Any]], **head: Any) -> str:
    """Write a file as `scaling.py` does, without the steps."""
    machine = {"device": "GPU", "torch": "2.11", **({"commit": commit} if commit else {})}
    shape = {"benchmark": "scaling", "size": "1b", "batch": 8, "block": 2048, "steps": 2}
    write_json(folder / name, {**shape, "machine": machine, "must": MUST, "rows": rows, **head})
    return str(folder / name)


def test_scaling_is_judged_by_its_best_row_and_by_its_losses(bench: dict[str, ModuleType]) -> None:
    verdicts = bench["verdicts"].scaling_verdicts
    rows = [
        row("single", 1, 100.0, [5.0, 4.0]),
        row("ddp", 2, 199.0, [5.0, 3.0]),
        row("ddp", 4, 360.0, [5.0, 3.5]),
        row("ddp", 4, 376.0, [5.0, 3.504], bucket_cap_mb=100),
        row("fsdp2", 4, 356.0, [5.0, 3.502]),
    ]
    data = {"must": MUST, "rows": rows}
    shares, losses = verdicts(data)
    assert "ddp 94.0% with bucket_cap_mb=100 (must 93%): met" in shares
    assert "fsdp2 89.0% with default settings (must 90%): **missed**" in shares
    assert "on 4 devices" in shares
    assert losses.startswith("Largest difference of a step's loss between rows of as many devices: 4.0e-03 (")
    assert losses.endswith("0.005): met.")
    rows[4]["losses"] = [5.0, 3.4985]
    assert verdicts(data)[-1].endswith("**missed**."), "from the farthest, not from the first"


def test_a_row_is_compared_with_one_device_of_its_own_sitting(
    bench: dict[str, ModuleType], tmp_path: Path
) -> None:
    """One device was 10% slower on the second day: against the first day's, its ddp would miss what it reaches."""
    merge, section = bench["merge_runs"].merge_sittings, bench["report"].section
    first = file(
        tmp_path,
        "first.json",
        "aaaaaaa",
        [
            row("single", 1, 100.0, [5.0]),
            row("ddp", 4, 300.0, [3.5]),
            row("fsdp2", 4, 364.0, [3.5]),
        ],
        plot="scaling.png",
    )
    alone = file(tmp_path, "alone.json", "bbbbbbb", [row("single", 1, 90.0, [5.0])])
    ddp = file(tmp_path, "ddp.json", "bbbbbbb", [row("ddp", 4, 342.0, [3.5])])
    data = {**merge([f"{first}:single,fsdp2", alone, ddp]), "must": MUST}
    assert [(item["strategy"], item["commit"], item["sitting"]) for item in data["rows"]] == [
        *(("single", "aaaaaaa", "aaaaaaa"), ("fsdp2", "aaaaaaa", "aaaaaaa")),
        *(("single", "bbbbbbb", "bbbbbbb"), ("ddp", "bbbbbbb", "bbbbbbb")),
    ]
    assert data["machine"]["commit"] == "aaaaaaa, bbbbbbb"
    text = section("scaling", data)
    assert "| 4 | ddp | 342 | 95.0% | 93% |" in text
    assert "ddp 95.0% with default settings (must 93%): met; fsdp2 91.0%" in text
    assert "| bbbbbbb |" in text
    assert "scaling.png" not in text, "what the first file drew is not what these rows are"
    write_json(tmp_path / "merged.json", data)
    assert merge([str(tmp_path / "merged.json")])["rows"] == data["rows"], "rows keep their sitting"

    lonely = {**merge([first, ddp]), "must": MUST}
    assert "| 4 | ddp | 342 |  | 93% |" in section("scaling", lonely), "no base, no share"
    named = json.loads(Path(ddp).read_text())
    named["machine"]["sitting"] = "evening"
    write_json(Path(ddp), named)
    (again,) = merge([ddp])["rows"]
    assert (again["commit"], again["sitting"]) == ("bbbbbbb", "evening")


@pytest.mark.parametrize("change", [{"batch": 4}, {"machine": {"device": "GPU", "torch": "2.12"}}])
def test_other_shapes_and_machines_are_not_merged(
    bench: dict[str, ModuleType], tmp_path: Path, change: dict[str, Any]
) -> None:
    rows = [row("single", 1, 100.0, [5.0])]
    one = file(tmp_path, "one.json", "aaaaaaa", rows)
    other = file(tmp_path, "other.json", "aaaaaaa", rows, **change)
    with pytest.raises(ValueError, match=r"other\.json is of another machine or shape than the first file"):
        bench["merge_runs"].merge_sittings([one, other])


def test_the_plot_is_of_what_was_measured_on_several_devices(bench: dict[str, ModuleType]) -> None:
    draw = bench["plots"].draw_scaling
    rows = [row("single", 1, 100.0, [5.0]), row("ddp", 2, 190.0, [4.0]), row("fsdp2", 2, 185.0, [4.0])]
    data = {"batch": 8, "block": 2048, "machine": {"device": "GPU"}, "must": MUST, "rows": rows}
    image = draw(data)
    assert image.startswith(b"\x89PNG")
    assert draw(copy.deepcopy(data)) == image, "the same numbers give the same file"
    assert draw({**data, "rows": [*rows[:1], row("ddp", 2, 150.0, [4.0])]}) != image
    assert draw({**data, "rows": rows[:1]}) is None
    assert draw({**data, "rows": rows[1:]}) is None, "nothing to compare with"


def test_a_split_step_is_compared_with_one_device_of_its_form_and_sitting(
    bench: dict[str, ModuleType], tmp_path: Path
) -> None:
    def step(form: str, devices: int, seconds: float) -> dict[str, Any]:
        shape = {"form": form, "devices": devices, "sequence_parallel": False, "checkpointing": "none"}
        return {**shape, "step_s": seconds, "tokens_per_s": 8 / seconds, "losses": [1.0]}

    eager = file(tmp_path, "a.json", "aaaaaaa", [step("eager", 1, 0.9), step("eager", 2, 0.6)])
    compiled = [step("compiled", 1, 0.5), step("compiled", 2, 0.6)]
    later = file(tmp_path, "b.json", "bbbbbbb", [step("eager", 1, 0.3), *compiled])
    data = bench["merge_runs"].merge_sittings([eager, later])
    text = bench["report"].section("tensor_parallel_step", data)
    assert "| eager | 2 | all | 0.600 | 13 | 1.50x |  | 1.00000 | aaaaaaa |" in text
    assert "eager 1.50x, met; compiled 0.83x, **missed**" in text
