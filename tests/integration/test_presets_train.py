"""Every preset of conf/model, shrunk in its proportions, trains three steps through the real command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import yaml

from caramba.cli import main
from caramba.config.estimate import check_widths
from caramba.config.model import ModelConfig
from caramba.data.checkpoint import load_tensors
from caramba.model import build_model
from tests.integration.commands import only_run
from tests.unit.config.estimate.presets import PRESETS, SMALL_VOCAB, shrunk_tree

pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.mark.parametrize("preset", PRESETS)
def test_three_steps_at_reduced_size(
    preset: str,
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = shrunk_tree(preset)
    model = ModelConfig.model_validate(tree)
    check_widths(model)
    option = tmp_path / "configs" / "model" / "small.yaml"
    option.parent.mkdir(parents=True)
    option.write_text(f"# {preset}\n{yaml.safe_dump(tree)}")
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--config-dir", str(option.parents[1]), "model=small", "train=pretrain", "device=cpu"]
    words += ["train.steps=3", "train.batch_size=2", "train.block_size=32", "benchmark=none"]
    words += ["data.max_bytes=400000", f"data.vocab_size={SMALL_VOCAB}"]
    status = main(words)
    shown = capsys.readouterr()
    built = build_model(model, seed=1337)
    assert status == 0, shown.out + shown.err
    run = only_run(tmp_path)
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "finished"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (finished,) = [event for event in events if event["event"] == "phase_finished"]
    assert finished["steps"] == 3
    assert 0 < finished["loss"] < 2 * math.log(SMALL_VOCAB)
    (file,) = run.glob("checkpoints/*.safetensors")
    trained = load_tensors(file)
    assert {name: item.shape for name, item in trained.items()} == {
        name: item.shape for name, item in built.state_dict().items()
    }
