"""An example plugin through the command line: trained, interrupted, resumed, swept, on two ranks, and generated from."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from caramba.data.checkpoint import load_tensors
from tests.integration.commands import caramba, interrupt_when

PLUGIN = Path(__file__).parents[1] / "plugin"
STEPS = 12
WORDS = (
    *(
        "launch",
        "--config-dir",
        "site",
        "model=gated_conv",
        "train=pretrain",
        "plugins=[gated_conv]",
        "device=cpu",
    ),
    *(
        "data.max_bytes=400000",
        "data.vocab_size=512",
        "train.block_size=32",
        "train.batch_size=4",
        "train.lr=0.003",
    ),
    *("train.save_every=3", "verify=none", "settings.instrument=none", "logger.tensorboard=false"),
)
TRAIN = (*WORDS, f"train.steps={STEPS}", "benchmark=none")


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """A person's folder: the package, and a group with a model that uses it."""
    shutil.copytree(PLUGIN, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_tensors(run / "checkpoints" / "pretrain.safetensors")


def runs_of(folder: Path) -> list[Path]:
    return sorted(file.parent for file in folder.glob("runs/*/*/manifest.json"))


def test_a_plugin_from_launch_to_text(folder: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    done = caramba([*TRAIN, "resume=never"], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    (whole,) = runs_of(folder)
    sources = json.loads((whole / "sources.json").read_text())["plugin gated_conv"]
    assert set(sources["files"]) == {f"gated_conv/{name}.py" for name in ("__init__", "schema", "layers")}
    assert json.loads((whole / "manifest.json").read_text())["plugins"] == [
        {"module": "gated_conv", "folder": str(folder)}
    ]

    interrupt_when("runs/*/*/checkpoints/pretrain.state.pt", [*TRAIN, "resume=never"], folder, cache, signal.SIGKILL)
    run = next(item for item in runs_of(folder) if item != whole)
    source = folder / "gated_conv" / "layers.py"
    text = source.read_text()
    source.write_text(text.replace("F.silu", "F.gelu"))
    refused = caramba(["resume", str(run)], folder, cache)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "the plugin gated_conv in " in refused.stderr
    assert "has changed since this run began: gated_conv/layers.py SHA-256" in refused.stderr
    source.write_text(text)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = caramba(["resume", str(run)], elsewhere, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = weights(run), weights(whole)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    words = ("--prompt", "def area(", "--max-new-tokens", "6", "--temperature", "0")
    made = caramba(["generate", str(run), *words], elsewhere, cache)
    assert made.returncode == 0, made.stdout + made.stderr
    refused = caramba(["export", str(run), "--out", "hf"], elsewhere, cache)
    assert refused.returncode == 2
    assert "GatedConvLayer is gated_conv.layers:GatedConv, which is not part of caramba" in refused.stderr
    source.write_text(text + "# a remark\n")
    made = caramba(["generate", str(run), *words], folder, cache)
    assert made.returncode == 0
    assert "other source than it was trained with: plugin gated_conv: gated_conv/layers.py" in made.stderr


def test_a_plugin_in_a_sweep_a_file_and_benchmarks(folder: Path, cache: Path) -> None:
    words = [word for word in WORDS if word != "launch"]
    swept = caramba(["-m", *words, "train.steps=2", "benchmark=none", "seed=1,2", "launcher=process"], folder, cache)
    assert swept.returncode == 0, swept.stdout + swept.stderr
    assert "2 of 2 points finished" in swept.stdout + swept.stderr
    first = runs_of(folder)[0]
    plain = json.loads((first / "manifest.json").read_text())
    plain["plugins"] = ["gated_conv"]
    (folder / "mine.json").write_text(json.dumps(plain))
    done = caramba(["run", "mine.json", "seed=5", "launcher.type=inline"], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = caramba([*WORDS, "train.steps=2", "benchmark=smoke"], folder, cache)
    assert measured.returncode == 0, measured.stdout + measured.stderr


def test_two_ranks_train_what_one_does(folder: Path, cache: Path) -> None:
    spread = ("parallel=ddp", "parallel.dp=2", "launcher=torchrun", "train.batch_size=2")
    found = []
    for words in ((), spread):
        done = caramba([*TRAIN, "train.steps=3", *words], folder, cache)
        assert done.returncode == 0, done.stdout + done.stderr
        found.append(weights(max(runs_of(folder), key=lambda run: (run / "manifest.json").stat().st_mtime_ns)))
    one, two = found
    for name in one:
        torch.testing.assert_close(one[name], two[name], atol=3e-4, rtol=1e-3)
    refused = caramba(
        [*TRAIN, "parallel=fsdp2_tp", "parallel.tp=2", "parallel.dp=1", "launcher=torchrun"], folder, cache
    )
    assert refused.returncode == 2
    assert "there is no plan for a GatedConvLayer, a layer of your own" in refused.stderr


def test_what_decodes_a_layer_that_cannot_be_is_refused_before_it_runs(folder: Path, cache: Path) -> None:
    schema = folder / "gated_conv" / "schema.py"
    text = schema.read_text().replace('    decoding = "cached"\n', "").replace("def cached_streams", "def no_streams")
    schema.write_text(text)
    refused = caramba([*WORDS, "train.steps=2", "benchmark=quick"], folder, cache)
    assert refused.returncode == 2
    assert "benchmark 'latency' (latency) decodes token by token" in refused.stderr
    assert not runs_of(folder)
    done = caramba([*TRAIN, "train.steps=2"], folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = caramba(["generate", "latest", "--prompt", "x"], folder, cache)
    assert refused.returncode == 2
    assert "does not say how it is decoded" in refused.stderr
    shapes = text.replace('"gate.weight": (self.d_model, self.d_model)', '"gate.weight": (self.d_model, 3)')
    schema.write_text(shapes)
    refused = caramba([*TRAIN, "train.steps=2", "resume=never"], folder, cache)
    assert refused.returncode == 2
    assert "gate.weight: declared (64, 3), the module has (64, 64)" in refused.stderr
    assert len(runs_of(folder)) == 1
