"""Means over seeds, tables, plots and comparisons, from run directories that the real writers make."""

from __future__ import annotations

import csv
import math
import shutil
import struct
from pathlib import Path

import pytest

from caramba.artifacts.across_runs import plot
from caramba.artifacts.across_runs.compare import metric_differences
from caramba.artifacts.across_runs.gather import ReportedMetric, RunRow, gather
from caramba.artifacts.across_runs.summary import Group
from caramba.artifacts.items import to_column
from caramba.artifacts.metrics import collect, standard_error
from caramba.artifacts.report import build_report
from caramba.artifacts.style import to_png
from caramba.artifacts.tables import number
from caramba.artifacts.write import write
from caramba.cli import main
from caramba.config.manifest import parse_manifest
from caramba.result import ITEMS, BenchmarkResult, Metric, PhaseResult, RunResult, to_plain
from caramba.runs import MANIFEST, mint
from caramba.runs.events import append_event
from caramba.runs.files import write_json
from caramba.runs.sweeps import Point, create_sweep

PERPLEXITY = "perplexity.student.perplexity"


def manifest_of(seed: int, width: int):
    layers = [{"type": "RMSNormLayer", "d_model": width}]
    model = {
        "embedder": {"vocab_size": 300, "d_model": width},
        "topology": {"type": "StackedTopology", "layers": layers},
    }
    runs = [{"id": "pre", "train": {"phase": "pretrain", "steps": 40}}]
    groups = [{"name": "main", "data": {"type": "stdlib", "vocab_size": 300}, "runs": runs}]
    return parse_manifest({"name": "demo", "seed": seed, "model": model, "groups": groups})


def finish(run, value, std=0.5):
    metrics = (
        Metric(PERPLEXITY, value, "", 64, std, "ppl"),
        Metric("latency.student.tok_s@prompt=8", 100 / value, "tokens/s", 4, 2.0, "lat"),
    )
    phases = (PhaseResult("pre", "pretrain", "student", 40, 400, 2.0, "", math.log(value)),)
    bench = BenchmarkResult("ppl", "perplexity", metrics)
    labels = {"proxy": "trained from scratch on text"}
    result = RunResult("demo", run.name, "ab" * 32, None, {}, {}, phases, benchmarks=(bench,), labels=labels)
    for step in (20, 40):
        append_event(run, "metrics", phase="pre", step=step, values={"loss": value, "running_loss": value + 40 - step})
    write_json(run / "artifacts" / "report.json", build_report(result, collect(result), (), ()))
    write_json(run / "result.json", {"status": "finished", **to_plain(result)})


@pytest.fixture(name="sweep", scope="module")
def _sweep(tmp_path_factory):
    """Two widths and three seeds: all of width 8 and two of width 16 have finished, the last has not begun."""
    root = tmp_path_factory.mktemp("collect") / "runs"
    cases = [(width, seed) for width in (16, 8) for seed in (1, 2, 3)]
    points = [
        (Point(number, [f"model.d_model={width}", f"seed={seed}"], str(number)), manifest_of(seed, width))
        for number, (width, seed) in enumerate(cases)
    ]
    sweep = create_sweep(
        "demo", ["model.d_model=16,8", "seed=1,2,3", "launcher.n_jobs=1,2"], "f" * 64, points, root=root
    )
    for (width, seed), (point, manifest) in zip(cases, points, strict=True):
        if (width, seed) == (16, 3):
            continue
        run = mint(manifest, point.overrides, root)
        sweep.link(point, run)
        finish(run, 30.0 + seed if width == 8 else 10.0 + 2 * seed)
    sweep.save()
    return sweep.folder


@pytest.fixture(name="called")
def _called(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*words, status=0):
        capsys.readouterr()
        assert main([str(word) for word in words]) == status
        return capsys.readouterr()

    return run


def test_a_sweep_becomes_a_table_with_mean_deviation_and_n(called, sweep, tmp_path):
    out = called("collect", sweep, "--csv", "--tex", "--plot", "--out", tmp_path / "o").out
    assert "5 of 6 runs finished (1 waiting); proxy teacher: trained from scratch on text" in out
    assert "Proxy teacher: trained from scratch on text.}" in (tmp_path / "o" / "table.tex").read_text()
    assert out.splitlines()[1].split() == ["model.d_model", PERPLEXITY, "n"]
    assert out.splitlines()[2].split() == ["8", "32", "±", "1", "3"]
    assert out.splitlines()[3].split() == ["16", "13", "±", "1", "*", "2"], "n and deviation are of what has finished"
    assert f"best {PERPLEXITY}: 13 ± 1 at model.d_model=16" in out
    rows = list(csv.DictReader((tmp_path / "o" / "summary.csv").open()))
    row = next(row for row in rows if row["metric"] == PERPLEXITY and row["model.d_model"] == "8")
    assert [float(row[name]) for name in ("mean", "std", "n")] == pytest.approx([32.0, 1.0, 3])
    runs = list(csv.DictReader((tmp_path / "o" / "runs.csv").open()))
    assert [row["state"] for row in runs] == ["finished", "finished", "waiting", *["finished"] * 3]
    assert float(runs[0]["loss.pre"]) == pytest.approx(math.log(12))
    tex = (tmp_path / "o" / "table.tex").read_text()
    assert r"16 & \textbf{13 $\pm$ " in tex
    assert r"model.d\_model & perplexity.student.perplexity $\downarrow$ & $n$" in tex
    assert "5 of 6 runs have finished" in tex
    line = next(line for line in tex.splitlines() if line.strip().startswith("8 &"))
    for run in (row["run"] for row in runs[3:]):
        name = run.rpartition("/")[2]
        assert f"{name}={name.split('-')[2][:8]}" in line, "every number leads to its runs and manifests"
    png = (tmp_path / "o" / "plot.png").read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", png[16:24])) > 400


def test_a_sweep_over_three_keys_is_drawn_as_parallel_coordinates(monkeypatch):
    figures = []
    monkeypatch.setattr(plot, "to_png", lambda figure, labels: (figures.append(figure), to_png(figure, labels))[1])
    keys = ["train.lr", "model.d_model", "train.optimizer"]

    def group(value, *values):
        metrics = {} if value is None else {PERPLEXITY: ReportedMetric(value)}
        return Group(values, (RunRow(None, "finished", dict(zip(keys, values, strict=True)), metrics),))

    groups = [
        group(30.0, "1e-2", "8", "lion"),
        group(10.0, "1e-3", "16", "adamw"),
        group(20.0, "1e-3", "8", "lion"),
    ]
    image = plot.draw_sweep([*groups, group(None, "1e-1", "8", "lion")], keys, PERPLEXITY, "demo", is_higher=False)
    assert image is not None
    assert image[:4] == b"\x89PNG"
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_xticklabels()] == [*keys, PERPLEXITY]
    lines = [line for line in axes.get_lines() if len(line.get_xdata()) == 4]
    heights = [[float(y) for y in line.get_ydata()] for line in lines]
    assert heights == [[1, 0, 1, 1], [0, 1, 0, 0], [0, 0, 1, 0.5]], "values in order; the metric's on the last axis"
    assert [line.get_linewidth() for line in lines] == [1.4, 3.5, 1.4], "the best is the thick one"


def test_other_metrics_keys_and_directions(called, sweep):
    out = called("collect", sweep, "--metric", "latency.student.tok_s@prompt=8", "--by", "seed").out
    assert out.splitlines()[1].split() == ["seed", "latency.student.tok_s@prompt=8", "n"]
    assert "at seed=1 " in out, "more tokens per second are better"
    out = called("collect", sweep, "--metric", PERPLEXITY, "--best", "max", "--by", "model.d_model,seed").out
    assert "at model.d_model=8, seed=3" in out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--metric", "perplexity.student.perplexty"], f"did you mean '{PERPLEXITY}'?"),
        (["--by", "sede"], "--by sede: no run sets it; did you mean 'seed'?"),
        (["--best", "most"], "collect: argument --best: invalid choice"),
        (["--cvs"], "collect: unrecognized arguments: --cvs; usage: caramba collect SWEEP|DIR"),
    ],
)
def test_mistakes_of_collect_are_named(called, sweep, words, text):
    assert text in called("collect", sweep, *words, status=2).err


def test_a_folder_of_runs_collects_as_its_sweep_does(called, sweep, tmp_path):
    out = called("collect", sweep.parents[1]).out
    assert out.splitlines()[0] == "demo: 5 of 5 runs finished; proxy teacher: trained from scratch on text"
    assert out.splitlines()[3].split()[:4] == ["16", "13", "±", "1"]
    assert "neither a sweep nor a run is there" in called("collect", tmp_path, status=2).err
    assert "no sweep there" in called("collect", "nowhere", status=2).err


def test_status_lists_sweeps_and_runs(called, sweep, tmp_path):
    root = sweep.parents[2]
    out = called("status", root).out
    assert f"sweep demo/sweeps/{sweep.name}: 6 points, 5 finished, 1 waiting" in out
    assert sum("finished  pre    40/40" in line for line in out.splitlines()) == 5
    assert len(called("status", sweep).out.splitlines()) == 7
    assert '"state": "finished"' in called("status", root, "--json").out
    assert "no such folder" in called("status", "nowhere", status=2).err
    assert "no runs under" in called("status", tmp_path).out


def test_the_reports_of_a_run_are_read_once(sweep, monkeypatch):
    read, opened = Path.read_text, []

    def counted(path, *words, **more):
        opened.append(path)
        return read(path, *words, **more)

    monkeypatch.setattr(Path, "read_text", counted)
    rows = gather(str(sweep)).finished
    reports = [row.run / "artifacts" / "report.json" for row in rows]
    assert [path for path in opened if path.name == "report.json" and path.is_file()] == reports
    assert all(row.proxy and row.metrics for row in rows)


def test_two_runs_compare_with_intervals_and_curves(called, sweep, tmp_path):
    first, second = sorted(
        (run for run in sweep.parents[1].iterdir() if (run / MANIFEST).is_file()),
        key=lambda run: run.stat().st_mtime,
    )[:2]
    out = called("compare", first, second, "--out", tmp_path / "c.png").out
    assert out.splitlines()[0].endswith("; proxy teacher: trained from scratch on text")
    assert "seed: 1 -> 2" in out
    assert (tmp_path / "c.png").stat().st_size > 10_000
    found = {item.key: item for item in metric_differences(first, second)}
    perplexity, speed = found[PERPLEXITY], found["latency.student.tok_s@prompt=8"]
    # The deviation of a perplexity is a standard error already; that of a throughput is of its n=4 samples.
    assert perplexity.value == pytest.approx(2.0)
    assert perplexity.half_width == pytest.approx(1.959964 * math.hypot(0.5, 0.5))
    assert speed.half_width == pytest.approx(1.959964 * math.hypot(2.0, 2.0) / 2)
    assert perplexity.is_clear is True
    assert speed.is_clear is False
    assert f"{number(perplexity.half_width)} *" in out
    assert found["loss.pre"].half_width is None
    assert "are the same run" in called("compare", first, first, status=2).err
    assert "no metric with that in its key" in called("compare", first, second, "--metric", "xyz", status=2).err


def accuracy_result(run, student_hits):
    """A run whose accuracy benchmark kept the items of teacher and student."""
    hits = {"teacher": [1, 1, 1, 1, 1, 1, 1, 0], "student": student_hits}
    rows = []
    for model, scores in hits.items():
        records = [
            {"id": f"q{index}", "text_sha256": f"t{index}", "cluster": str(index), "acc": score}
            for index, score in enumerate(scores)
        ]
        kept = {ITEMS: to_column(records, "acc", is_main=True)}
        rows.append({"repeat": 0, "model": model, "task": "piqa", "metric": "acc", "value": 0.5} | kept)
    bench = BenchmarkResult("tasks", "accuracy", (), tuple(rows))
    return RunResult("demo", run.name, "ab" * 32, None, {}, {}, (), benchmarks=(bench,))


def test_items_of_runs_are_written_and_compared_in_pairs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [mint(manifest_of(seed, 32), []) for seed in (0, 1)]
    for run, hits in zip(runs, ([1, 0, 0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]), strict=True):
        write(accuracy_result(run, hits), run)
        append_event(run, "run_finished")
    csv_text = (runs[0] / "artifacts" / "items.csv").read_text().splitlines()
    assert csv_text[0].startswith("benchmark,model,task,metric,is_main,item")
    assert csv_text[9] == "tasks,student,piqa,acc,1,q0,t0,0,1.0"
    assert "items" not in (runs[0] / "artifacts" / "accuracy.csv").read_text().splitlines()[0]
    assert main(["compare", *map(str, runs)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "piqa" in line)
    assert "+0.7500" in line
    assert "McNemar" in line
    assert main(["compare", str(runs[0]), str(runs[0]), "--models", "teacher,student"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("A  teacher\nB  student\nsame items")
    assert "-0.7500" in said
    assert main(["compare", str(runs[0]), str(runs[0]), "--models", "teacher,nobody"]) == 2
    assert "has no items of both teacher and nobody" in capsys.readouterr().err
    assert main(["compare", str(runs[0]), str(runs[1]), "--models", "teacher"]) == 2
    assert "expected two names" in capsys.readouterr().err


def test_standard_errors_of_reports_new_and_old():
    assert standard_error("controls.a.kl", None, 4, 0.5) == 0.5
    assert standard_error("perplexity.student.nll", 0.5, 4) == 0.5, "a report of before"
    assert standard_error("latency.student.tok_s", 0.5, 4) == 0.25


def test_more_than_two_runs_compare_by_what_differs(called, sweep, tmp_path):
    runs = gather(str(sweep)).finished
    paths = [row.run for row in runs[:4]]
    out = called("compare", *paths, "--out", tmp_path / "many.png").out
    assert "manifests: 3 keys differ" in out
    head = next(line for line in out.splitlines() if line.split() == ["A", "B", "C", "D"])
    widths = next(line for line in out.splitlines() if line.strip().startswith("model.embedder.d_model"))
    assert widths.split()[1:] == [row.words["model.d_model"] for row in runs[:4]]
    assert head
    values = next(line for line in out.splitlines() if line.strip().startswith(PERPLEXITY))
    assert values.split()[1:] == [
        text for row in runs[:4] for text in (number(row.metrics[PERPLEXITY].value), "±", "0.5000")
    ]
    assert "ratio" not in out
    assert (tmp_path / "many.png").read_bytes()[:4] == b"\x89PNG"
    only = called("compare", *paths, "--metric", "tok_s", "--out", tmp_path / "many.png").out
    assert "latency.student.tok_s" in only
    assert PERPLEXITY not in only


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--models", "teacher,student"], "names two models for 3 runs"),
        (["--metric", "absent"], "no metric with that in its key is in two reports"),
        (["x.json"], "files of caramba eval are compared two at a time"),
        (["again"], "which is named twice"),
    ],
)
def test_mistakes_of_many_runs_are_named(called, sweep, extra, message):
    paths = [row.run for row in gather(str(sweep)).finished[:3]]
    words = [paths[0] if word == "again" else word for word in extra]
    assert message in called("compare", *paths, *words, status=2).err


def test_collect_groups_by_any_key_of_the_manifest(called, sweep):
    out = called("collect", sweep, "--by", "model.embedder.d_model").out
    assert out.splitlines()[2].split()[:2] == ["8", "32"]
    end = called("collect", sweep, "--by", "embedder.vocab_size").out
    assert end.splitlines()[2].split()[0] == "300"
    assert "a key of the manifests needs one value in each" in called("collect", sweep, "--by", "absent", status=2).err


def test_collect_omits_damaged_runs_and_names_them(called, sweep, tmp_path):
    root = tmp_path / "damaged"
    runs = [row.run for row in gather(str(sweep)).finished[:3]]
    for run in runs:
        shutil.copytree(run, root / run.name)
    (root / runs[0].name / "artifacts" / "report.json").write_text('{"metr')
    (root / runs[1].name / "overrides.txt").write_bytes(b"\xff\xfe=1")
    found = called("collect", root)
    assert "1 of 3 runs finished (2 damaged)" in found.out
    for run in runs[:2]:
        assert f"collect: {root / run.name}: omitted: " in found.err
