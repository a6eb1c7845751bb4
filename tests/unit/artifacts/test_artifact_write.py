"""The artifacts folder: complete, hashed, the same bytes each time, and honest about what is missing."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sample_run import without

from caramba.artifacts import write
from caramba.errors import CarambaError
from caramba.result import BenchmarkResult, Metric, RunResult
from caramba.runs.files import sha256_of

PLOTS = ["summary", "latency_vs_context", "memory_scaling", "transplant"]
FILES = [
    "perplexity.csv",
    "latency.csv",
    "memory.csv",
    "transplant.csv",
    "tables.tex",
    *(f"{plot}.{form}" for plot in PLOTS for form in ("png", "svg", "pdf")),
    "report.html",
]


def report_of(run_dir: Path) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads((run_dir / "artifacts/report.json").read_text(), parse_constant=refuse)


def test_everything_is_written_and_hashed_the_same_each_time(result: RunResult, written: Path, tmp_path: Path) -> None:
    index = write(result, tmp_path)
    folder = tmp_path / "artifacts"
    assert index.root == str(folder)
    assert [entry.path for entry in index.entries] == ["report.json", *FILES]
    assert sorted(path.name for path in folder.iterdir()) == sorted(["report.json", *FILES])
    assert all(entry.sha256 == sha256_of(folder / entry.path) for entry in index.entries)
    assert all(entry.sha256 == sha256_of(written / "artifacts" / entry.path) for entry in index.entries)
    report = report_of(tmp_path)
    assert report["artifacts"] == [{"path": e.path, "sha256": e.sha256} for e in index.entries[1:]]
    assert report["omitted"] == []


def test_the_report_holds_the_run(result: RunResult, written: Path) -> None:
    report = report_of(written)
    assert list(report) == [
        "schema", "name", "run_id", "manifest_sha256", "git_commit", "labels", "environment", "plan", "phases",
        "transplant", "metrics", "failures", "verify", "artifacts", "omitted",
    ]  # fmt: skip
    assert report["schema"] == 1
    assert report["phases"][1]["loss"] == 2.35
    assert report["transplant"]["energy_kept"] == [0.97, 0.95]
    nll = report["metrics"]["perplexity.student.nll"]
    assert nll == {
        "value": 2.342,
        "unit": "nats/token",
        "n": 256,
        "std": None,
        "standard_error": 0.021,
        "source": "ppl",
    }
    compare = report["verify"][0]
    assert compare["passed"] is False
    assert compare["checks"][2] == {
        "key": "verify.compare.logits_mean_l1",
        "name": "logits_mean_l1",
        "value": 0.613,
        "bound": 0.5,
        "is_minimum": False,
        "unit": "",
        "passed": False,
    }
    assert report["verify"][1]["passed"] is True


@pytest.mark.usefixtures("blank_figures")
def test_csv_rows_keep_every_digit_under_the_union_of_columns(result: RunResult, tmp_path: Path) -> None:
    extra = BenchmarkResult("lat2", "latency", rows=({"model": "student", "note": None, "steps_ms": [0.1, 1 / 3]},))
    latency = result.benchmarks[1]
    write(dataclasses.replace(result, benchmarks=(latency, extra), transplant=None), tmp_path)
    with open(tmp_path / "artifacts/latency.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:4] == ["benchmark", "repeat", "model", "prompt"]
    assert list(rows[0])[-2:] == ["note", "steps_ms"]
    original = latency.rows[3]
    assert float(rows[3]["prefill_ms_p20"]) == original["prefill_ms_p20"]
    assert rows[-1]["benchmark"] == "lat2"
    assert rows[-1]["prompt"] == rows[-1]["note"] == ""
    assert json.loads(rows[-1]["steps_ms"]) == [0.1, 1 / 3]


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("kind", "gone"),
    [
        ("perplexity", ["perplexity.csv", "summary.png: perplexity"]),
        ("latency", ["latency.csv", "summary.png: throughput", "latency_vs_context.png"]),
        ("memory", ["memory.csv", "summary.png: KV cache", "memory_scaling.png"]),
    ],
)
def test_a_failed_benchmark_is_recorded_and_the_rest_is_written(
    result: RunResult, tmp_path: Path, kind: str, gone: list[str]
) -> None:
    index = write(without(result, kind, "RuntimeError: out of memory"), tmp_path)
    report = report_of(tmp_path)
    assert report["failures"] == [{"id": f"bad_{kind}", "error": "RuntimeError: out of memory"}]
    assert [item["name"] for item in report["omitted"]] == gone
    assert all("bad_" + kind in item["reason"] and "out of memory" in item["reason"] for item in report["omitted"])
    assert {entry.path for entry in index.entries} == {"report.json", *FILES} - {
        name.replace(".png", ending) for name in gone for ending in (".png", ".svg", ".pdf")
    }


def test_a_run_without_any_measurement_leaves_its_reports_alone(result: RunResult, tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    for stale in FILES:
        (tmp_path / "artifacts" / stale).write_text("of an earlier call")
    index = write(dataclasses.replace(result, benchmarks=(), verdicts=(), transplant=None), tmp_path)
    reports = ["report.json", "report.html"]
    assert [entry.path for entry in index.entries] == reports
    assert sorted(path.name for path in (tmp_path / "artifacts").iterdir()) == sorted(reports)
    reasons = {item["name"]: item["reason"] for item in report_of(tmp_path)["omitted"]}
    assert set(reasons) == {name for name in FILES if not name.endswith((".html", ".svg", ".pdf"))}
    assert reasons["memory_scaling.png"] == "no memory benchmark ran"


def test_every_transplanted_layer_is_a_row_of_csv_and_table(written: Path) -> None:
    rows = list(csv.DictReader((written / "artifacts" / "transplant.csv").open()))
    assert [row["name"] for row in rows] == ["topology.a", "topology.b"]
    assert [row["kv_ratio"] for row in rows] == ["4.0", "2.0"]
    assert (rows[0]["error"], rows[0]["block_relative_l1"], rows[1]["error"]) == ("0.281", "0.1", "")
    table = (written / "artifacts" / "tables.tex").read_text()
    assert r"    0 & 32 & 4.00$\times$ & 0.9700 & 0.2810 & 4 \\ % - | transplant.layers[0].cached" in table
    assert r"    1 & 64 & 2.00$\times$ & -- & -- & -- \\" in table


@pytest.mark.usefixtures("blank_figures")
def test_the_kv_panel_is_left_out_when_only_quantised_caches_were_measured(result: RunResult, tmp_path: Path) -> None:
    memory = result.benchmarks[2]
    only = dataclasses.replace(memory, metrics=tuple(m for m in memory.metrics if "kind=fp16" not in m.key))
    write(dataclasses.replace(result, benchmarks=(result.benchmarks[0], only)), tmp_path)
    omitted = {item["name"]: item["reason"] for item in report_of(tmp_path)["omitted"]}
    assert omitted["summary.png: KV cache"] == "no exact 16-bit cache was measured"
    assert not {"memory.csv", "memory_scaling.png"} & set(omitted)


@pytest.mark.usefixtures("blank_figures")
def test_an_undefined_ratio_is_listed(result: RunResult, tmp_path: Path) -> None:
    metrics = (
        Metric("memory.teacher.peak_bytes@seq=1,kind=fp16", 0.0, "bytes"),
        Metric("memory.student.peak_bytes@seq=1,kind=fp16", 1.0, "bytes"),
    )
    write(dataclasses.replace(result, benchmarks=(BenchmarkResult("m", "memory", metrics),)), tmp_path)
    omitted = {item["name"]: item["reason"] for item in report_of(tmp_path)["omitted"]}
    assert omitted["ratio.peak_bytes@seq=1,kind=fp16"] == "memory.teacher.peak_bytes@seq=1,kind=fp16 is 0"


def test_what_is_not_json_is_refused_by_name_before_anything_is_written(result: RunResult, tmp_path: Path) -> None:
    with pytest.raises(CarambaError, match=r"plan\.memory\[1\]: got nan"):
        write(dataclasses.replace(result, plan={"memory": [1.0, math.nan]}), tmp_path)
    with pytest.raises(CarambaError, match=r"environment\.cwd: got PosixPath"):
        write(dataclasses.replace(result, environment={"cwd": Path("/").absolute()}), tmp_path)
    clash = BenchmarkResult("b", "latency", rows=({"benchmark": "x"},))
    with pytest.raises(CarambaError, match="rename the column"):
        write(dataclasses.replace(result, benchmarks=(clash,)), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pngs_have_pixels_and_no_metadata(written: Path) -> None:
    for name in (file for file in FILES if file.endswith(".png")):
        data = (written / "artifacts" / name).read_bytes()
        chunks: dict[bytes, bytes] = {}
        place = 8
        while place < len(data):
            (length,) = struct.unpack(">I", data[place : place + 4])
            chunks[data[place + 4 : place + 8]] = data[place + 8 : place + 8 + length]
            place += 12 + length
        width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
        assert width >= 900
        assert height >= 600
        assert set(chunks) == {b"IHDR", b"pHYs", b"IDAT", b"IEND"}
        assert struct.unpack(">I", chunks[b"pHYs"][:4])[0] == round(150 / 0.0254)


def test_a_proxy_teacher_is_named_everywhere(result: RunResult, written: Path, tmp_path: Path) -> None:
    index = write(dataclasses.replace(result, labels={"proxy": "the real $1 weights were out of reach"}), tmp_path)
    assert report_of(tmp_path)["labels"] == {"proxy": "the real $1 weights were out of reach"}
    assert (tmp_path / "artifacts/tables.tex").read_text().count(r"Proxy teacher: the real \$1 weights") == 4
    plain = {item["path"]: item["sha256"] for item in report_of(written)["artifacts"]}
    noted = {entry.path: entry.sha256 for entry in index.entries}
    assert all(noted[name] != plain[name] for name in FILES if name.endswith(".png"))


def test_a_users_matplotlib_settings_change_nothing(written: Path, tmp_path: Path) -> None:
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.facecolor: red\nlines.linewidth: 9\n")
    code = (
        "import sys; from pathlib import Path; from sample_run import make_result; import caramba.artifacts as a\n"
        "assert not {'torch', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "a.write(make_result(), Path('out')); assert 'torch' not in sys.modules\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    here = str(Path(__file__).parent)
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": here, "HOME": str(tmp_path)},
        check=True,
    )
    for name in ["report.json", *FILES]:
        assert (tmp_path / "out/artifacts" / name).read_bytes() == (written / "artifacts" / name).read_bytes()
