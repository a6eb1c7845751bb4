"""Every benchmark case that runs on a CPU runs through run.py and writes a file that the page can be made of."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench"

sys.path.insert(0, str(BENCH))
try:
    registry = importlib.import_module("registry")
finally:
    sys.path.remove(str(BENCH))
SMOKE = [
    name
    for name in registry.case_names()
    if "\nSMOKE_OPTIONS" in (registry.CASES / f"{name}.py").read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", SMOKE)
def test_case_smoke_options_write_a_renderable_file(name: str, bench: ModuleType, tmp_path: Path) -> None:
    case = registry.load_case(name)
    for package in getattr(case.module, "NEEDS", ()):
        pytest.importorskip(package)
    out = tmp_path / f"{name}.json"
    words = [name, *case.smoke, "--out", str(out)]
    assert bench.main(words) == 0
    data = json.loads(out.read_text())
    assert data["benchmark"] == name
    assert data["made_by"].startswith(f"python scripts/bench/run.py {name}")
    assert data["machine"]
    report = importlib.import_module("report")
    if report.has_section(name) and name != "decode":  # whose shares are of a GPU's read bandwidth
        assert report.section(name, data).startswith("## ")


@pytest.mark.usefixtures("bench")
def test_help_of_every_case_names_its_options() -> None:
    for name in registry.case_names():
        text = registry.load_case(name).parser().format_help()
        assert "--out" in text
        assert "--device" in text


def test_option_line_gives_flags_lists_choices_and_positionals() -> None:
    module = SimpleNamespace(__doc__="A case.", OPTIONS="--size=1b|tiny --rows=1,2 --only=* --text= --again rest*")
    parser = registry.Case("x", module).parser()
    found = vars(parser.parse_args([]))
    assert found == {"size": "1b", "rows": [1, 2], "only": [], "text": None, "again": False, "rest": []} | {
        "device": "auto",
        "out": Path("docs/benchmarks/x.json"),
    }
    given = parser.parse_args(["a", "--rows", "3", "--only", "b", "c", "--again", "--size", "tiny"])
    assert (given.rest, given.rows, given.only, given.again, given.size) == (
        ["a"],
        [3],
        ["b", "c"],
        True,
        "tiny",
    )


def test_a_wrong_name_of_an_option_ends_with_two(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["kernels", "--size", "tiny", "--only", "flash"], "--only flash: expected some of adamw_step"),
        (["inference", "--parts", "shrot,"], "--parts shrot: expected some of batch"),
    ):
        with pytest.raises(SystemExit) as ended:
            bench.main([*words, "--device", "cpu"])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


@pytest.mark.usefixtures("bench")
def test_record_resumes_rows_of_the_same_machine_commit_and_head_only(tmp_path: Path) -> None:
    record = importlib.import_module("record")
    out = tmp_path / "x.json"
    here = {"device": "a", "torch": "2", "commit": "c"}

    def resumed(machine: dict[str, str], **head: Any) -> list[Any]:
        again = record.Record("x", out, ["x"], torch.device("cpu"))
        again.start(machine, resume=("rows",), **head)
        return again.data["rows"]

    first = record.Record("x", out, ["x"], torch.device("cpu"))
    first.start(here, size=(1, 2))
    measured: list[int] = []

    def measure() -> list[dict[str, int]]:
        measured.append(1)
        return [{"n": 1}]

    first.measure([("one", measure), ("one again", measure)], seconds=60)
    first.measure([("one", measure), ("late", measure)], seconds=-1)
    rows = [{"case": "one", "n": 1}, {"case": "one again", "n": 1}]
    assert (len(measured), json.loads(out.read_text())["rows"]) == (2, rows)
    assert json.loads(out.read_text())["left_out"] == ["late: no time left"]
    assert resumed(here | {"driver": "another"}, size=(1, 2)) == rows
    assert resumed(here, size=(1, 3)) == []
    for key in here:
        assert resumed(here | {key: "another"}, size=(1, 2)) == [], key


def test_unknown_case_ends_with_two_and_names_the_nearest(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["decod"]) == 2
    assert "did you mean 'decode'?" in capsys.readouterr().err


@pytest.mark.usefixtures("bench")
def test_interleave_turns_and_warm_up_keep_the_order() -> None:
    timing = importlib.import_module("timing")
    order: list[str] = []
    sides = {name: lambda name=name: float(len(order.append(name) or order)) for name in "ab"}
    assert timing.interleave(sides, repeats=2, warm=1) == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert order == ["a", "b"] * 3


@pytest.mark.usefixtures("bench")
def test_spread_of_ten_values_is_median_and_middle_60_percent() -> None:
    timing = importlib.import_module("timing")
    found = timing.spread([n / 1000 for n in range(10)])
    assert found == pytest.approx({"median_ms": 4.5, "p20_ms": 2.0, "p80_ms": 7.0})


def test_joined_files_keep_newer_rows_with_their_commits_and_are_of_equal_sizes(
    bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(name: str, commit: str, sizes: int, rows: list[dict[str, Any]], **more: Any) -> str:
        head = {"benchmark": "memory", "made_by": name, "machine": {"commit": commit}, "sizes": {"window": sizes}}
        (tmp_path / name).write_text(json.dumps(head | {"rows": rows} | more))
        return str(tmp_path / name)

    trained = {"case": "train", "side": "memory", "chunk": 32, "compiled": "no", "over_window": 0.5}
    state = {"case": "state", "tokens": 64, "bytes_per_layer": 8}
    old = write("old", "a", 4, [trained, state], left_out=["peak: no time left"], teacher_gain={"nats": 0.7})
    new = write("new", "b", 4, [trained | {"over_window": 0.75}, {"case": "peak", "rise": 0.0}])
    out = tmp_path / "joined.json"
    assert bench.main(["memory", "--join", old, new, "--compiled", "no,", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [(row["case"], row["commit"]) for row in found["rows"]] == [("train", "b"), ("state", "a"), ("peak", "b")]
    assert (found["left_out"], found["teacher_gain"], found["made_by"]) == ([], {"nats": 0.7}, "old; new")
    assert (found["summary"]["train_over_window"], found["summary"]["peak_rise"]) == ({"no": 0.75}, 0.0)
    other = write("other", "b", 8, [])
    with pytest.raises(SystemExit) as ended:
        bench.main(["memory", "--join", old, other, "--out", str(out)])
    assert ended.value.code == 2
    assert "got sizes {'window': 8}, expected {'window': 4}" in capsys.readouterr().err
