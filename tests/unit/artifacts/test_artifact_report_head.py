"""The head of a report: facts from the run's files, one sentence from its keys, curves by phase, and no teacher."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from sample_run import make_result

from caramba.artifacts import write
from caramba.artifacts.header import conclude, duration_text, read_facts, sum_sittings
from caramba.artifacts.metrics import collect
from caramba.artifacts.recall import list_ratios
from caramba.artifacts.tables import list_tables
from caramba.artifacts.training_curves import POINTS, read_curves
from caramba.result import BenchmarkResult, Check, Metric, PhaseResult, RunResult, Verdict
from caramba.runs.events import append_event

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def write_run(folder: Path) -> Path:
    """Write what a run of two phases leaves next to its artifacts."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overrides.txt").write_text("model=tiny_dba\nnotes='two words'\n")
    model = {"name": "tiny_dba", "embedder": {"d_model": 128, "vocab_size": 2048}}
    (folder / "manifest.json").write_text(json.dumps({"model": model}))
    append_event(folder, "run_started")
    for phase, steps, loss in (("blockwise", 1200, 0.5), ("global", 40, 3.0)):
        for step in range(10, steps + 1, 10):
            values = {"running_loss": loss + 1 / step, "lr": 1e-3, "tokens_per_s": 5000.0 + step}
            append_event(folder, "metrics", phase=phase, step=step, values=values)
        append_event(folder, "metrics", phase=phase, step=steps, values={"val_loss": loss})
    append_event(folder, "run_finished")
    return folder


def alone() -> RunResult:
    """A run from scratch: one model, measured, and no teacher."""
    metrics = (Metric("perplexity.student.perplexity", 20.0, "", 64, 0.5, "ppl"),)
    phases = (PhaseResult("pre", "pretrain", "student", 40, 400, 2.0, "", 3.0),)
    bench = BenchmarkResult("ppl", "perplexity", metrics)
    return RunResult("demo", "r", "ab" * 32, None, {"cpu": "CPU", "cpu_count": 2}, {}, phases, benchmarks=(bench,))


def test_sittings_are_summed_without_the_time_between_them() -> None:
    events = [
        ("run_started", 0),
        ("metrics", 10),
        ("run_started", 1000),
        ("group_started", 1001),
        ("metrics", 1030),
        ("run_finished", 1090),
        ("run_started", 2000),
        ("group_finished", 2008),
    ]
    assert sum_sittings({"event": name, "time": time} for name, time in events) == (40.0, 2)
    assert [duration_text(value) for value in (2.25, 125, 7260)] == ["2.2 s", "2 min 5 s", "2 h 1 min"]


def test_facts_come_from_the_files_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    facts = {fact.name: fact.text for fact in read_facts(make_result(), run)}
    assert facts["Command"] == "caramba launch model=tiny_dba 'notes='\"'\"'two words'\"'\"''"
    assert facts["Model"] == "tiny_dba, width 128, 2,048 tokens"
    assert facts["Git"].startswith("cdcdcdcdcdcd")
    assert facts["Date"].endswith("UTC")
    (run / "manifest.json").write_text("{ torn")
    assert "Model" not in {fact.name for fact in read_facts(make_result(), run)}


def test_conclusion_numbers_are_keys_of_the_report() -> None:
    result = make_result()
    metrics = collect(result)
    pieces = conclude(result, metrics)
    text = "".join(piece.text for piece in pieces)
    assert text.startswith("The student has 1.042 times the perplexity of its teacher (95% interval ")
    assert text.endswith("times its cache bytes per token.")
    numbers = [piece for piece in pieces if piece.is_number]
    assert [float(piece.text) for piece in numbers] == pytest.approx(
        [metrics[str(piece.key)].value for piece in numbers], rel=1e-3
    )
    bare = dataclasses.replace(result, benchmarks=(), verdicts=())
    last = "".join(piece.text for piece in conclude(bare, {}))
    assert last.startswith("The last phase, global_0, ended at a training loss of 2.350")
    assert "Nothing was measured" in conclude(dataclasses.replace(bare, phases=()), {})[0].text


@pytest.mark.usefixtures("blank_figures")
def test_a_run_without_teacher_calls_its_model_a_model(tmp_path: Path) -> None:
    result = alone()
    metrics = collect(result)
    (comparison, *_) = list_tables(result, metrics)
    assert comparison.head == ("Metric", "Model")
    assert [cell.text for cell in comparison.rows[0]] == ["Perplexity ↓", "20 ± 0"] or comparison.rows
    run = write_run(tmp_path / "run")
    write(result, run)
    page = (run / "artifacts" / "report.html").read_text(encoding="utf-8")
    head, _, rest = page.partition("<h2")
    assert "The model has a held-out perplexity of" in head
    shown = rest.partition('id="every-number"')[0].partition('id="provenance"')[0]
    assert "teacher" not in shown.lower()
    assert "Student" not in shown


def test_curves_are_placed_one_phase_after_another_and_thinned(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    blockwise, last = read_curves(run)
    assert (blockwise.start, blockwise.steps, last.start, last.steps) == (0, 1200, 1200, 40)
    assert last.place_points(last.held_out) == [(1240, 3.0)]
    long = {step: float(step) for step in range(10_000)}
    assert len(blockwise.place_points(long)) <= POINTS
    assert blockwise.place_points({1: float("nan")}) == []


def test_ratios_by_position_are_in_order() -> None:
    checks = (
        Check("ppl_ratio_at_16_63", 1.2, None),
        Check("ppl_ratio_at_0_15", 1.1, None),
        Check("kl", 0.1, None),
    )
    result = dataclasses.replace(make_result(), verdicts=(Verdict("fidelity", "global_0", checks),))
    assert list_ratios(result) == [(0, 15, 1.1), (16, 63, 1.2)]


@pytest.fixture(scope="module", name="page")
def _page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's report with its figures."""
    run = write_run(tmp_path_factory.mktemp("report") / "run")
    write(make_result(), run)
    return run / "artifacts" / "report.html"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize(("width", "scheme"), [(1280, 0), (390, 1)], ids=["wide, dark", "narrow, light"])
def test_report_fits_a_screen(page: Path, tmp_path: Path, width: int, scheme: int) -> None:
    shots = Path(os.environ.get("CARAMBA_SCREENSHOTS", tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    shot = shots / f"report-{width}-{'light' if scheme else 'dark'}.png"
    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--blink-settings=preferredColorScheme={scheme}", f"--user-data-dir={tmp_path / 'profile'}"]
    words += [f"--window-size={max(width, 500)},3000", f"--screenshot={shot}", page.as_uri()]
    if width < 500:  # Chromium's narrowest window: the page is framed instead
        frame = tmp_path / "frame.html"
        frame.write_text(
            f'<body style="margin:0"><iframe src="{page.as_uri()}" style="width:{width}px;height:3000px;border:0">'
        )
        words[-1] = frame.as_uri()
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    data = shot.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (max(width, 500), 3000)
    assert len(data) > 50_000  # not an empty page
