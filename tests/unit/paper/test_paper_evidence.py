"""What a paper may state: numbers by key, settings by path, and who a proxy's numbers are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from caramba.errors import CarambaError, ConfigError
from caramba.paper.evidence import Evidence, read_evidence


def test_settings_are_found_by_the_ids_of_runs_and_benchmarks(evidence: Evidence) -> None:
    settings = evidence.settings
    assert settings["runs.blockwise.train.steps"] == "3"
    assert settings["benchmarks.latency.config.timed_runs"] == "2"
    assert settings["phases.pretrain_0.tokens"] == "1{,}228{,}800"
    assert settings["model.teacher.manifest.topology.type"] == r"\texttt{StackedTopology}"
    assert settings["runs.global.train.use_amp"] in ("true", "false", r"\texttt{auto}")
    assert not [path for path in settings if path.startswith(("paper.", "launcher.", "groups."))]


def test_numbers_rest_on_a_proxy_where_they_name_or_compare_with_the_teacher(evidence: Evidence) -> None:
    marked = {key for key, item in evidence.results.items() if item.is_proxy}
    assert {"perplexity.teacher.nll", "perplexity.teacher_continued.nll", "ratio.perplexity"} <= marked
    assert {key for key in evidence.results if key.startswith("verify.")} <= marked
    assert not [key for key in marked if key.partition(".")[2].startswith("student")]


def test_numbers_carry_dispersion_and_unit(evidence: Evidence) -> None:
    assert evidence.result("perplexity.student.nll").tex == r"2.342\,$\pm$\,0.0210\,nats/token"
    assert evidence.result("memory.student.model_bytes@seq=256,kind=fp16").tex == r"3{,}899{,}392\,bytes"
    assert evidence.result("ratio.perplexity").tex.startswith("1.042")
    with pytest.raises(CarambaError, match=r"'perplexity\.studnt\.nll' is no key .* did you mean"):
        evidence.result("perplexity.studnt.nll")


@pytest.mark.parametrize(
    ("value", "text"),
    [(3, "3"), (4096, "4096"), (65536, "65{,}536"), (0.1, "0.1"), (3e-4, "0.0003"), (2.5e-7, r"$2.5\times10^{-7}$")],
)
def test_settings_keep_every_digit(value: float, text: str, run: Path, tmp_path: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    (tmp_path / "artifacts").symlink_to(run / "artifacts")
    first = manifest["groups"][0]["runs"][0]
    key = "steps" if isinstance(value, int) else "lr"
    first["train"][key] = value
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert read_evidence(tmp_path, tmp_path).settings[f"runs.{first['id']}.train.{key}"] == text


def test_a_group_of_several_is_read_with_its_own_settings(run: Path, tmp_path: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    other = json.loads(json.dumps(manifest["groups"][0]))
    other["name"] = "other"
    other["runs"][0]["train"]["steps"] = 77
    manifest["groups"].append(other)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    folder = tmp_path / "groups" / "other"
    shutil.copytree(run / "artifacts", folder / "artifacts")
    first = other["runs"][0]["id"]
    assert read_evidence(folder, tmp_path, "other").settings[f"runs.{first}.train.steps"] == "77"


def test_tables_that_were_changed_are_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    with open(copy / "artifacts/tables.tex", "a") as file:
        file.write("% more\n")
    with pytest.raises(
        ConfigError,
        match=r"tables\.tex: its SHA-256 is not that of the file that report\.json lists; write the artifacts",
    ):
        read_evidence(copy, copy)


def test_numbers_that_are_not_finite_are_refused(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    report = json.loads((copy / "artifacts/report.json").read_text())
    report["metrics"]["perplexity.student.nll"]["value"] = float("nan")
    (copy / "artifacts/report.json").write_text(json.dumps(report))
    with pytest.raises(
        ConfigError,
        match=r"not a report of this version \(ValueError: metric perplexity\.student\.nll is nan",
    ):
        read_evidence(copy, copy)


@pytest.mark.parametrize("name", ["../evil.png", "a/b.png", "/tmp/evil.png", "a\\\\b.png", "..", "", ".hidden.png"])
def test_artifacts_are_files_of_their_folder(name: str, run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    report = json.loads((copy / "artifacts/report.json").read_text())
    report["artifacts"].append({**report["artifacts"][0], "path": name})
    (copy / "artifacts/report.json").write_text(json.dumps(report))
    with pytest.raises(ConfigError, match=r"expected the name of a file in artifacts/, without folders"):
        read_evidence(copy, copy)
