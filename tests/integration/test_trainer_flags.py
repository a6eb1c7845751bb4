"""Flags of Lightning's Trainer: stopping, kept weights and their resume, and refusals with the key that does the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import caramba
from caramba.artifacts.across_runs.run import Run
from caramba.config.plugins import activate
from caramba.data.checkpoint import load_tensors
from caramba.errors import ConfigError, ExtensionFailedError
from tests.integration.commands import SMALL

pytestmark = pytest.mark.usefixtures("blank_figures")
WORDS = (
    *("model=tiny", "train=pretrain", "train.steps=40", "train.batch_size=2", "train.block_size=32"),
    *("benchmark=none", "verify=none", "device=cpu", "settings.instrument=none", "train.num_workers=0"),
    *("settings.eval_iters=5", "settings.save_every=10", "trainer.limit_val_batches=3", *SMALL),
)
# A rate that diverges, so that the held-out loss rises soon.
STOPS = (
    "train.lr=1.0",
    "train.scheduler=constant",
    "trainer.early_stopping.patience=2",
    "trainer.save_top_k=2",
    "trainer.save_last_k=1",
)


def launch(*words: str) -> Run:
    return caramba.launch([*WORDS, *words], quiet=True)


def held_out(run: Run) -> dict[int, float]:
    return {int(row["step"]): row["val_loss"] for row in run.history("pretrain") if row.get("val_loss")}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    activate(())
    for name in ("failing", "failing_target"):
        sys.modules.pop(name, None)


def test_early_stopping_keeps_the_best_and_the_last_weights() -> None:
    run = launch(*STOPS, "trainer.restore_best=true", "trainer.profiler=simple")
    losses = held_out(run)
    best = min(losses, key=losses.__getitem__)
    stopped = run.report["phases"][0]["steps"]
    assert stopped == best + 2 * 5 < 40
    assert run.metrics["val_loss.pretrain"] == losses[best]  # of the weights that it ended with
    second = sorted(losses, key=losses.__getitem__)[1]
    last = stopped - 1 - (stopped - 1) % 10 if stopped % 10 else stopped
    kept = {file.name for file in (run.path / "checkpoints/kept").iterdir()}
    names = (f"best-step{best}", f"best-step{second}", f"step{last}")
    assert kept == {f"pretrain-{name}.safetensors" for name in names}
    ours = load_tensors(run.path / "checkpoints/pretrain.safetensors")
    theirs = load_tensors(run.path / f"checkpoints/kept/pretrain-best-step{best}.safetensors")
    assert all(bool((ours[key] == theirs[key]).all()) for key in theirs)
    assert "run_training_batch" in (run.path / "profile/pretrain/fit-simple.txt").read_text()


def test_stopping_and_kept_weights_resume_equal() -> None:
    Path("failing_target.py").write_text(
        "from pathlib import Path\nfrom lightning.pytorch import Callback\n"
        "class Fails(Callback):\n    def __init__(self, config):\n        pass\n"
        "    def on_train_batch_end(self, trainer, *args):\n"
        "        if trainer.global_step == 17 and not Path('mended').exists():\n"
        "            raise RuntimeError('once')\n"
    )
    Path("failing.py").write_text(
        "from typing import Literal\nfrom caramba.config import CallbackConfig\n"
        "class FailsConfig(CallbackConfig):\n    target = 'failing_target:Fails'\n"
        "    type: Literal['Fails'] = 'Fails'\n"
    )
    words = (
        "plugins=[failing]",
        "callbacks=[{type: Fails}]",
        *STOPS,
        "train.lr=0.01",
        "trainer.save_last_k=3",
    )
    with pytest.raises(ExtensionFailedError, match="step 17"):
        launch(*words)
    Path("mended").touch()
    resumed, whole = launch(*words), launch(*words, "name=whole")
    assert held_out(resumed) == held_out(whole)
    assert len(list((whole.path / "checkpoints/kept").iterdir())) >= 4
    for file in (whole.path / "checkpoints/kept").iterdir():
        ours, theirs = load_tensors(resumed.path / "checkpoints/kept" / file.name), load_tensors(file)
        assert all(bool((ours[key] == theirs[key]).all()) for key in theirs)
    assert len(list((resumed.path / "checkpoints/kept").iterdir())) == len(
        list((whole.path / "checkpoints/kept").iterdir())
    )


def test_time_limit_ends_a_phase_with_its_weights(capfd: pytest.CaptureFixture[str]) -> None:
    run = caramba.launch([*WORDS, "train.steps=100000", "trainer.max_time=00:00:00:01"])
    assert run.state == "finished"
    assert 0 < run.report["phases"][0]["steps"] < 100000
    assert (run.path / "checkpoints/pretrain.safetensors").is_file()
    assert "trainer.max_time=00:00:00:01" in capfd.readouterr().out


@pytest.mark.parametrize(("every", "metric"), [("5", "val_loss.pretrain"), ("null", "loss.pretrain")])
def test_a_search_goes_by_the_held_out_loss(every: str, metric: str) -> None:
    from caramba.launch.sweeps.search import default_metric

    assert default_metric(caramba.compile([*WORDS, f"settings.eval_iters={every}"]).manifest) == metric


def test_rows_as_often_as_asked() -> None:
    run = launch("train.steps=4", "trainer.log_every_n_steps=1")
    assert [row["step"] for row in run.history("pretrain") if row.get("loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trainer.patience=3"], "trainer.patience: unknown key"),
        (["trainer.max_tim=00:00:01:00"], "did you mean 'max_time'"),
        (["trainer.max_epoch=3"], "did you mean 'max_epochs'.*train.steps=N"),
        (["trainer.accumulate_grad_batches=2"], "train.gradient_accumulation_steps=N"),
        (["trainer.max_time=90"], "expected DD:HH:MM:SS"),
        (["trainer.profiler=fast"], "expected.*simple"),
        (["trainer.early_stopping.monitor=loss"], "val_loss"),
        (["trainer.save_top_k=1", "settings.eval_iters=null"], "settings.eval_iters="),
        (["trainer.save_last_k=1", "settings.save_every=null"], "settings.save_every="),
        (
            ["trainer.save_top_k=1", "parallel=fsdp2", "parallel.dp=2"],
            "parallel=fsdp2 has the weights in parts",
        ),
        (["trainer.restore_best=true", "train.dtype=bfloat16", "train.use_amp=false"], "masters"),
    ],
)
def test_wrong_flags_are_refused(words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        caramba.compile([*WORDS, *words])
