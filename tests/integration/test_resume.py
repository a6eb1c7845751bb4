"""Whatever stops a run, resuming it ends with the weights of a run that was not stopped, bit for bit."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba.data.checkpoint import load_tensors
from caramba.runs.events import read_events
from caramba.train.trainer import read_saved_step, state_path
from tests.integration.commands import FORKS, SMALL, SMALL_TEACHER, caramba, interrupt_when, only_run

WORDS = [
    *("experiment=smoke", "benchmark=none", "verify=none", *SMALL, *SMALL_TEACHER),
    *(
        "train.phases.pretrain.steps=16",
        "train.phases.blockwise.steps=8",
        "train.phases.drift.steps=8",
        "train.phases.global.steps=8",
        "train.steps=null",
    ),
    *("train.save_every=4", "train.eval_every=10", "train.accumulate=2", "settings.instrument=none"),
    *("train.phases.blockwise.optimizer=lion", "train.phases.blockwise.lr=5e-4"),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    done = caramba(WORDS, folder, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    return only_run(folder)


def assert_same_weights(run: Path, whole: Path) -> None:
    names = {file.name for file in (whole / "checkpoints").glob("*.safetensors")}
    assert names == {file.name for file in (run / "checkpoints").glob("*.safetensors")}
    assert len(names) >= 5
    for name in names:
        ours, theirs = load_tensors(run / "checkpoints" / name), load_tensors(whole / "checkpoints" / name)
        assert ours.keys() == theirs.keys()
        different = [key for key in ours if not torch.equal(ours[key], theirs[key])]
        assert not different, f"{name}: {different}"


# Steps are multiples of save_every, so a phase's weights stop one that has taken its last step and is not on record.
KILLS = (
    "pretrain.safetensors",
    "blockwise.state.pt",
    "drift.state.pt",
    "global.state.pt",
)


def fill_the_disk() -> None:
    """Larger files than this cannot be written any more, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))


def test_stopped_in_every_way_and_phase_and_resumed_it_is_bit_equal(whole: Path, tmp_path: Path, cache: Path) -> None:
    """A full disk, the same command again, Ctrl-C, and a kill in every phase: all stop one run."""
    done = caramba(WORDS, tmp_path, cache, preexec_fn=fill_the_disk)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "caramba resume" in done.stderr
    run = only_run(tmp_path)
    assert not list(run.rglob("*.part"))
    status = interrupt_when("runs/*/*/checkpoints/pretrain.state.pt", WORDS, tmp_path, cache, signal.SIGINT)
    assert status == 130
    log = (tmp_path / "log.txt").read_text()
    assert "did not finish" in log, "the same command goes on with an unfinished run"
    assert "interrupted; continue with: caramba resume" in log
    words = ["resume", str(run)]
    for file in KILLS:
        status = interrupt_when(f"runs/*/*/checkpoints/{file}", words, tmp_path, cache, signal.SIGKILL)
        assert status == -signal.SIGKILL, file
        run = only_run(tmp_path)
        assert not (run / "result.json").exists(), file
        if file == "blockwise.state.pt":
            state = torch.load(run / "checkpoints" / file, weights_only=True)
            assert {key for one in state["optimizer_states"][0]["state"].values() for key in one} == {"momentum"}
        words = ["resume", str(run)]
    # As a kill leaves it between the record of a phase and the end of its state.
    state_path(only_run(tmp_path), "pretrain").write_bytes(b"of no use")
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_weights(run, whole)
    assert not list(run.glob("checkpoints/*.state.pt")), "the state of a finished phase is of no more use"


def test_a_kill_loses_no_more_steps_than_lie_between_two_saves(tmp_path: Path, cache: Path) -> None:
    """Killed when the row of step 30 is on record: what is saved by then is no more than `save_every` steps behind."""
    words = ["launch", "model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu", *SMALL]
    words += ["train.batch_size=2", "train.block_size=64", "train.steps=400", "train.eval_every=400"]
    words += ["train.save_every=4", "settings.instrument=none", "train.compile=false"]
    events = "runs/*/*/events.jsonl"
    status = interrupt_when(events, words, tmp_path, cache, signal.SIGKILL, text='"step": 30,')
    assert status == -signal.SIGKILL
    run = only_run(tmp_path)
    last = max(event["step"] for event in read_events(run) if event["event"] == "metrics")
    assert 30 <= last < 400
    assert read_saved_step(state_path(run, "pretrain")) >= last - 4
    assert not (run / "result.json").exists()


def _stop_as_training_begins() -> None:
    """A signal when Lightning has set up everything and has called no hook of a batch yet."""
    from caramba.train.callbacks import Monitoring

    begin = Monitoring.on_train_start

    def stopped(self: Monitoring, trainer: Any, pl_module: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        begin(self, trainer, pl_module)

    Monitoring.on_train_start = stopped


@pytest.mark.skipif(not FORKS, reason="the run is changed in the process that it is forked in")
def test_a_stop_as_training_begins_is_answered_by_the_first_step(tmp_path: Path, cache: Path) -> None:
    """Trap: Lightning had SIGTERM then, and ended the run as by Ctrl-C, with a step half accumulated and no state."""
    words = ["launch", "model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu", *SMALL]
    words += ["train.batch_size=2", "train.block_size=64", "train.steps=8", "train.accumulate=2"]
    words += ["settings.instrument=none", "train.compile=false"]
    done = caramba(words, tmp_path, cache, preexec_fn=_stop_as_training_begins)
    assert done.returncode == 143, done.stderr
    assert "stopped by SIGTERM; continue with: caramba resume" in done.stderr
    assert read_saved_step(state_path(only_run(tmp_path), "pretrain")) == 1


def test_resuming_a_finished_run_repeats_nothing(whole: Path, cache: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in whole.glob("checkpoints/*")}
    done = caramba(["resume", str(whole)], whole, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has finished: nothing is left to do but its artifacts" in done.stderr
    assert {file: file.stat().st_mtime_ns for file in whole.glob("checkpoints/*")} == before
