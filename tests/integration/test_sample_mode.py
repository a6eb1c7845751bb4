"""mode=sample in a manifest: text after training, once, in the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from caramba.cli import main
from caramba.config.manifest import RunConfig
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from tests.integration.commands import caramba, only_run
from tests.integration.export.samples import DBA, loud, make_run, transformer

SAMPLE = {"prompts": ["abc", "one two"], "generate": {"max_new_tokens": 6, "temperature": 0.8}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose student the samples are of, and its tokens beside it."""
    return make_run(tmp_path_factory.mktemp("trained") / "a", loud(transformer(DBA)))


def written(folder: Path, student: Path, sample: dict[str, Any]) -> Path:
    model = json.loads((student / "manifest.json").read_text())["model"] | {"checkpoint": str(student)}
    data = {"type": "tokens", "path": str(student.parents[2] / "tokens")}
    runs = [{"id": "look", "mode": "sample", "seed": 5, "sample": sample}]
    manifest = {"name": "alone", "model": model, "groups": [{"name": "main", "data": data, "runs": runs}]}
    (folder / "manifest.yaml").write_text(yaml.safe_dump(manifest))
    return folder / "manifest.yaml"


def test_a_run_samples_once_and_as_the_command_does(tmp_path: Path, trained: Path, cache: Path) -> None:
    file = written(tmp_path, trained, SAMPLE)
    here = tmp_path / "here"
    here.mkdir()
    done = caramba(["run", str(file)], here, cache)
    assert done.returncode == 0, done.stderr
    run = only_run(here)
    samples = json.loads((run / "samples" / "look.json").read_text())
    assert [row["seed"] for row in samples["rows"]] == [5, 6]
    assert all(len(row["tokens"]) <= 6 for row in samples["rows"])
    options = ("--prompt", "abc", "--seed", "5", "--max-new-tokens", "6", "--temperature", "0.8", "--json")
    by_hand = caramba(["generate", str(trained), "--device", "cpu", *options], here, cache)
    assert by_hand.returncode == 0, by_hand.stderr
    (row,) = json.loads(by_hand.stdout)["rows"]
    assert (row["tokens"], row["text"]) == (samples["rows"][0]["tokens"], samples["rows"][0]["text"])
    before = (run / "samples" / "look.json").stat().st_mtime_ns
    assert caramba(["resume", str(run)], here, cache).returncode == 0
    assert (run / "samples" / "look.json").stat().st_mtime_ns == before


def test_what_cannot_be_sampled_is_refused_before_anything_runs(
    tmp_path: Path,
    trained: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARAMBA_HOME", str(cache))
    limited = SAMPLE | {"generate": {"max_new_tokens": 6, "max_seq_len": 8}}
    for sample, text in (
        (SAMPLE | {"role": "teacher"}, "sample.role=teacher, and the model has no teacher"),
        (limited, "exceed the 8 positions"),
        (
            SAMPLE | {"generate": {"cache_kind": "auto", "cache_quality_text": "nowhere.txt"}},
            "cache_quality_text=nowhere.txt",
        ),
    ):
        assert main(["run", str(written(tmp_path, trained, sample))]) == 2
        assert text in capsys.readouterr().err
        assert not list(tmp_path.glob("runs/*/*/samples"))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"mode": "sample"}, "mode=sample needs sample; write both"),
        ({"sample": SAMPLE}, "mode=train has no use for sample"),
        ({"mode": "sample", "sample": SAMPLE, "steps": 3}, "mode=sample trains and verifies nothing"),
        ({"mode": "sample", "sample": {"prompts": []}}, "sample.prompts"),
        (
            {"mode": "sample", "sample": SAMPLE | {"generate": {"top_p": 2.0}}},
            "sample.generate.top_p: got 2.0",
        ),
    ],
)
def test_a_run_says_both_or_neither(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_as(RunConfig, {"id": "look", **values})
