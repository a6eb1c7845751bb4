"""Benchmarks that failed are tried again by a resume, wherever they stand, and nothing else is done twice."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from caramba.runs.sweeps import read_sweep
from tests.integration.commands import FORKS, SMALL, SMALL_TEACHER, caramba, only_run
from tests.integration.test_variants import manifest

pytestmark = pytest.mark.skipif(not FORKS, reason="the run is changed in the process that it is forked in")

QUICK = [
    *("train.steps=2", "train.batch_size=2", "train.block_size=32", "settings.instrument=none", "device=cpu"),
    *("verify=none", *SMALL),
]
CONFIG = "benchmark.benchmarks.0.config"


def _no_perplexity() -> None:
    module = importlib.import_module("caramba.evaluation.perplexity")

    def fails(*args: Any) -> Any:
        raise MemoryError("no room for the logits")

    module.perplexity = fails


def _no_controls() -> None:
    from caramba.experiment import controls

    def fails(*args: Any, **settings: Any) -> Any:
        raise MemoryError("no room for the logits")

    controls.agreement = fails


def _no_numbers() -> None:
    _no_perplexity()
    _no_controls()


def _no_bfloat16() -> None:
    from caramba.experiment import ladder

    take = ladder.take_steps

    def fails(session: Any, config: Any, spec: Any, steps: Any, **more: Any) -> Any:
        if steps.keys["use_amp"]:
            raise MemoryError("no room for the weights")
        return take(session, config, spec, steps, **more)

    ladder.take_steps = fails


def stages(run: Path) -> dict[str, dict[str, Any]]:
    files = sorted((run / "stages").glob("*.json"))
    return {file.stem.partition("-")[2]: json.loads(file.read_text()) for file in files}


def errors(run: Path) -> list[str]:
    found = [bench for stage in stages(run).values() for bench in stage["benchmarks"]]
    return sorted(bench["id"] for bench in found if bench["error"] is not None)


def marks(run: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mtime_ns for file in run.glob("checkpoints/*.safetensors")}


def test_rows_of_surgery_phases_and_controls_are_tried_again(tmp_path: Path, cache: Path) -> None:
    words = [
        *QUICK,
        *SMALL_TEACHER,
        "benchmark=controls",
        f"{CONFIG}.num_batches=1",
        f"{CONFIG}.block_size=32",
    ]
    words += [f"{CONFIG}.controls=[weight_svd]", f"{CONFIG}.cache_kinds=[]", f"{CONFIG}.distil=true"]
    words += [f"{CONFIG}.batch_size=4", "benchmark.benchmarks.2.config.sequence_lengths=[32]"]
    sizes = ("num_batches=1", "block_size=32", "batch_size=4")
    words += [f"benchmark.benchmarks.1.config.{size}" for size in sizes]

    done = caramba(words, tmp_path, cache, preexec_fn=_no_numbers)
    assert done.returncode == 1, done.stderr
    run = only_run(tmp_path)
    names = ("transplant", "blockwise", "drift", "global")
    rows = {f"perplexity.student_{name}" for name in names} | {"perplexity.teacher_continued"}
    subjects = ("teacher", "student_transplant", "student", "weight_svd", "weight_svd_distilled")
    assert set(errors(run)) == {"perplexity", *rows, *(f"controls.{name}" for name in subjects)}
    for name in errors(run):
        assert name in done.stderr.splitlines()[-1], "each is named with the way to try it again"
    before = marks(run)
    memory = stages(run)["final"]["benchmarks"][1]

    again = caramba(["resume", str(run)], tmp_path, cache)
    assert again.returncode == 0, again.stdout + again.stderr
    assert errors(run) == []
    assert marks(run) == before, "nothing is trained again, distilled controls included"
    assert stages(run)["final"]["benchmarks"][1] == memory, "what was measured stays"
    with open(run / "artifacts" / "perplexity.csv") as lines:
        text = lines.read()
    assert all(f"student_{name}" in text for name in names)
    report = json.loads((run / "artifacts" / "report.json").read_text())
    assert report["metrics"]["controls.weight_svd_distilled.ppl_ratio"]["value"] > 0


def test_a_variant_is_measured_again_from_its_weights(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(manifest(runs=manifest()["runs"][:2])))
    words = ["manifest=study.yaml", "settings.instrument=none"]
    assert caramba(words, tmp_path, cache, preexec_fn=_no_perplexity).returncode == 1
    run = only_run(tmp_path)
    assert errors(run) == ["ppl.baseline", "ppl.gqa"]
    before = marks(run)
    again = caramba(["resume", str(run)], tmp_path, cache)
    assert again.returncode == 0, again.stdout + again.stderr
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "study.yaml").write_text((tmp_path / "study.yaml").read_text())
    assert caramba(words, tmp_path / "whole", cache).returncode == 0
    ours, theirs = ((folder / "artifacts/perplexity.csv").read_text() for folder in (run, only_run(tmp_path / "whole")))
    assert (ours, marks(run)) == (theirs, before)


def test_rows_that_stood_on_a_mended_rung_are_measured_again(tmp_path: Path, cache: Path) -> None:
    words = ["launch", "model=tiny", "train=none", "verify=none", "benchmark=ladder", *SMALL, "device=cpu"]
    words += ["model.topology.layers.0.repeat=1", f"{CONFIG}.rows=[baseline,bf16,fused_ce]"]
    words += [f"{CONFIG}.leave_one_out=false", f"{CONFIG}.largest=false", f"{CONFIG}.twins=1"]
    sizes = {"batch_size": 2, "block_size": 32, "warmup_steps": 1, "timed_steps": 2, "loss_steps": 3}
    words += [f"{CONFIG}.{key}={value}" for key, value in sizes.items()] + [f"+{CONFIG}.val_windows=2"]
    done = caramba(words, tmp_path, cache, preexec_fn=_no_bfloat16)
    assert done.returncode == 1, done.stderr
    run = only_run(tmp_path)
    assert errors(run) == ["ladder.bf16"]
    first = stages(run)

    failing = caramba(["resume", str(run)], tmp_path, cache, preexec_fn=_no_bfloat16)
    assert failing.returncode == 1
    kept = stages(run)
    assert list(kept) == list(first)
    assert {name: kept[name] for name in kept if name != "ladder.bf16"} == {
        name: first[name] for name in first if name != "ladder.bf16"
    }, "a row that fails once more costs no other"

    again = caramba(["resume", str(run)], tmp_path, cache)
    assert again.returncode == 0, again.stdout + again.stderr
    now = stages(run)
    assert list(now) == list(first)
    assert now["ladder.baseline"] == first["ladder.baseline"]
    (before,), (after,) = (found["ladder.fused_ce"]["benchmarks"][0]["rows"] for found in (first, now))
    assert before["val_loss"] != after["val_loss"], "it is on top of bfloat16 now"
    assert now["ladder.twin_1"] != first["ladder.twin_1"], "the top may be another"


def test_the_same_command_tries_only_what_failed_again(tmp_path: Path, cache: Path) -> None:
    words = ["launch", "model=tiny", "train=pretrain", *QUICK, "benchmark=smoke"]
    assert caramba(words, tmp_path, cache, preexec_fn=_no_perplexity).returncode == 1
    run = only_run(tmp_path)
    before, others = marks(run), stages(run)["final"]["benchmarks"][1:]

    again = caramba(words, tmp_path, cache)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"resuming {run}, where benchmark perplexity failed (resume=never starts a new run)" in again.stderr
    assert only_run(tmp_path) == run
    assert (errors(run), marks(run), stages(run)["final"]["benchmarks"][1:]) == ([], before, others)
    assert caramba(words, tmp_path, cache).returncode == 0
    assert len(list(tmp_path.glob("runs/*/*"))) == 2, "what has finished is done again in a run of its own"


def test_a_sweep_goes_on_in_a_point_that_lacks_only_a_benchmark(tmp_path: Path, cache: Path) -> None:
    words = ["-m", "model=tiny", "train=pretrain", "seed=1,2", *QUICK, "benchmark=smoke"]
    done = caramba(words, tmp_path, cache, preexec_fn=_no_perplexity)
    assert done.returncode == 1, done.stderr
    (folder,) = tmp_path.glob("runs/*/sweeps/*")
    runs = [run for point in read_sweep(folder).points if (run := read_sweep(folder).run_of(point))]
    before = [marks(run) for run in runs]
    (runs[1] / "result.json").write_text('{"status": "failed"}')  # of no form that this version knows

    again = caramba(["resume", str(folder)], tmp_path, cache)
    assert again.returncode == 0, again.stdout + again.stderr
    points = read_sweep(folder).points
    assert [len(point.runs) for point in points] == [1, 2], "one goes on where it was, the other is made anew"
    assert [marks(run) for run in runs] == before
    assert (errors(runs[0]), errors(runs[1])) == ([], ["perplexity"])
    assert "perplexity.student.perplexity" in (runs[0] / "artifacts" / "report.json").read_text()
