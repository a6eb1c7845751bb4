"""Two ranks train what one process trains, and that is on record: data parallel, with sharded weights, with shared
blocks; a sharded run goes on with one rank or with two, and its state is a checkpoint of its own."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import random
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor

from caramba import worker
from caramba.artifacts import style
from caramba.cli import main
from caramba.data.checkpoint import load_tensors, load_training_state
from caramba.data.checkpoint.folder import MODEL, latest_sharded_state
from caramba.errors import CheckpointError, ConfigError
from caramba.experiment.session import StageLedger
from caramba.launch.freeze import freeze
from caramba.model import build_model, load_pretrained
from caramba.model.parallel.stages import TIED
from caramba.runs import mint
from caramba.runs.exit_codes import PREEMPTED, end_now
from caramba.runs.files import write_json
from caramba.train import has_saved_state, state_path
from tests.integration.commands import SMALL_TEACHER, leave_blank
from tests.integration.rank_checks import check_sharded_models, check_stages
from tests.preloaded import start_ranks

pytestmark = pytest.mark.usefixtures("blank_figures")
STEPS, SAVED = 8, 2
WORDS = (
    "model.embedder.vocab_size=512",
    *("model=tiny", "train=pretrain", f"train.steps={STEPS}", "train.block_size=32", "train.lr=0.003"),
    *("train.max_grad_norm=0.5", f"train.save_every={SAVED}", "train.eval_every=2"),
    *("benchmark=none", "verify=none", "device=cpu", "logger.tensorboard=false", "settings.instrument=none"),
)
CONTROLS = "benchmark.benchmarks.0.config"
SHARDED = ("parallel=fsdp2", "train.batch_size=4")
RUNS = {
    "one": ("train.batch_size=8",),
    "ddp": ("parallel=ddp", "train.batch_size=2", "train.gradient_accumulation_steps=2"),
    "fsdp2": SHARDED,
    "bfloat16_sums": ("parallel=ddp", "parallel.reduce_dtype=bfloat16", "train.batch_size=4"),
    "fsdp2_bfloat16_sums": ("parallel=fsdp2", "parallel.reduce_dtype=bfloat16", "train.batch_size=4"),
    "fsdp2_tp": ("parallel=fsdp2_tp", "train.batch_size=8"),
    "grown": ("parallel=fsdp2", "train.batch_size=8"),
    "stopped": (*SHARDED, "train.activation_checkpointing=full"),
    "pipeline": (
        *("parallel=pipeline", "parallel.num_micro_batches=4", "train.batch_size=4"),
        *("train.gradient_accumulation_steps=2", "train.activation_checkpointing=full"),
    ),
}
BLOCKS = (
    "train=blockwise",
    "train.steps=3",
    "train.batch_size=2",
    "train.save_every=2",
    "train.eval_every=2",
)
GOLDEN = Path(__file__).with_name("strategies.json")
"""What one process trained and how far from it each strategy may be; GOLDEN=write has the test write it anew."""
STUDENT = ("model=tiny_dba", *SMALL_TEACHER)
DISTILLED = {
    "blocks_one": (*BLOCKS, "train.gradient_accumulation_steps=2"),
    "blocks_data": (*BLOCKS, "parallel=ddp"),
    "controls": (
        *(*BLOCKS, "parallel=ddp", "benchmark=controls", "~train.phases.drift"),
        *(f"{CONTROLS}.{key}" for key in ("num_batches=1", "block_size=64", "distil=true", "controls=[random]")),
    ),
}


RANKED = (
    "ddp",
    "fsdp2",
    "bfloat16_sums",
    "fsdp2_bfloat16_sums",
    "fsdp2_tp",
    "blocks_data",
    "stopped",
    "pipeline",
    "pipeline",
    "grown",
)
"""What two ranks run, in this order: what was stopped the first time goes on the second, and `grown` with one rank."""


def as_rank(rank: int, port: int) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({key: str(value) for key, value in {**here, "MASTER_PORT": port}.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def free_port() -> int:
    """Return a port that is free, of those that no connection is given by the system until it is used.

    Drawn by the system: training seeds Python's numbers, and two runs of these tests would draw the same.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


def end_when_saved(run_dir: Path) -> None:
    """Ask this process to stop once a state is there, as SLURM does before a time limit."""

    def watch() -> None:
        while not has_saved_state(state_path(run_dir, "pretrain")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, daemon=True).start()


def rank_main(rank: int, folders: dict[str, Path], ports: list[int]) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # each run would look through all that was loaded before
    asked: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "_saved", leave_blank)
        # A question that waits for the device before every batch.
        patch.setattr(_TrainingEpochLoop, "_broadcast_sigterm_tensor", lambda _: asked.append("once"))
        as_rank(rank, ports[0])
        check_sharded_models(folders["exact"], freeze(list(WORDS)).manifest.model)
        as_rank(rank, ports[1])
        for is_tied in (False, True):
            check_stages(freeze([*WORDS, f"model.head.tied={is_tied}"]).manifest.model)
        stopped, ended = set(), ("pipeline", "stopped")
        for name, port in zip(RANKED, ports[2:], strict=True):
            as_rank(rank, port)
            is_stopped = name in ended and name not in stopped
            if is_stopped:
                stopped.add(name)
                if rank == 0:
                    end_when_saved(folders[name])
            status = worker.run(folders[name])
            if rank == 0:
                assert (status == 0) != is_stopped, (name, status)
                if is_stopped and name == "pipeline":
                    check_state_of_stages(folders[name])
            if dist.is_initialized():  # a process that was stopped ends, and does not part from the others
                dist.destroy_process_group()
    assert not asked, "ranks agree on a stop by themselves"
    end_now(0)


def check_state_of_stages(run_dir: Path) -> None:
    """The state of a pipeline holds every stage once, and each draws numbers of its own: their layers are others."""
    state = load_training_state(state_path(run_dir, "pretrain"))
    first, last = state["ranks"]
    assert not state.keys() & first.keys()
    for stage in (first, last):
        assert {"state_dict", "optimizer_states", "rng", "running_loss"} <= stage.keys()
    assert not torch.equal(first["rng"]["cpu"], last["rng"]["cpu"])
    assert first["state_dict"].keys() & last["state_dict"].keys() <= {f"model.{TIED}"}


def write_tokens(file: Path) -> str:
    """Write a corpus that is the same under every Python and NumPy, and return the words that name it.

    Small numbers are frequent, and every fourth token repeats the one before. 14 windows are held out, of which neither
    4 nor 8 rows make whole batches: a last batch of fewer counts for as much as it holds.
    """
    drawn = np.random.RandomState(1).randint(0, 512, 9_000)
    tokens = drawn**3 // 512**2
    tokens[3::4] = tokens[2::4]
    np.save(file, tokens.astype(np.uint16))
    return f"data.path={file}"


def stop_with_one_rank(run_dir: Path) -> None:
    """Train as one rank does until a state is saved."""
    end_when_saved(run_dir)
    assert worker.run(run_dir) == PREEMPTED
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folders(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run directories, trained: `one` by this process, the others by two ranks; `stopped` was not let finish."""
    root = tmp_path_factory.mktemp("parallel")
    made = {}
    corpus = ("data=tokens", write_tokens(root / "tokens.npy"))
    for name, words in RUNS.items():
        words = [*WORDS, *corpus, *words, f"name={name}"]
        made[name] = mint(freeze(words).manifest, words, root)
    made["exact"] = root / "exact"
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "_saved", leave_blank)
        assert worker.run(made["one"]) == 0
        stop_with_one_rank(made["grown"])
        for name, words in DISTILLED.items():
            words = [
                *WORDS,
                *corpus,
                *STUDENT,
                *words,
                f"name={name}",
                f"model.teacher.checkpoint={made['one']}",
            ]
            made[name] = mint(freeze(words).manifest, words, root)
        assert worker.run(made["blocks_one"]) == 0
    start_ranks(rank_main, (made, [free_port() for _ in range(2 + len(RANKED))]), 2)
    return made


def rows(run: Path, key: str) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "metrics" and key in event["values"]]
    assert len({event["step"] for event in found}) == len(found), "one writer"
    return {event["step"]: event["values"][key] for event in found}


def weights(run: Path, phase: str) -> dict[str, Tensor]:
    return load_tensors(run / "checkpoints" / f"{phase}.safetensors")


def same(run: Path, other: Path, within: float = 1e-4, phase: str = "pretrain") -> None:
    """AdamW makes a step of about lr out of any gradient: where one is near 0, rounding shows."""
    ours, theirs = weights(run, phase), weights(other, phase)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=within)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2_tp"])
def test_two_ranks_train_as_one_process(folders: dict[str, Path], name: str) -> None:
    run, one = folders[name], folders["one"]
    same(run, one, within=5e-4 if name == "fsdp2_tp" else 1e-4)
    keys = ("val_loss", "grad_norm", "update_norm", "layer_grad_norm/embedder")
    for key in (
        *keys,
        *(["loss"] if name != "ddp" else []),
    ):  # of the last micro-batch, of which ddp has two here
        assert rows(run, key) == pytest.approx(rows(one, key), rel=2e-4), key
    plan = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
    assert plan["data_parallel"]["value"] == (1 if name == "fsdp2_tp" else 2)
    assert not state_path(run, "pretrain").exists()


@pytest.mark.parametrize("name", ["one", "ddp", "fsdp2", "fsdp2_tp", "pipeline", "grown"])
def test_strategies_give_the_loss_curve_on_record(folders: dict[str, Path], name: str) -> None:
    if name == "one" and os.environ.get("GOLDEN") == "write":
        write_golden(folders["one"])
    golden = json.loads(GOLDEN.read_text())
    for key, within in golden["within"].items():
        found = {str(step): value for step, value in rows(folders[name], key).items()}
        assert found == pytest.approx(golden["one"][key], rel=within), f"{key}, {golden['machine']}"
    first, *_, last = golden["one"]["val_loss"].values()
    assert first - last > 100 * golden["within"]["val_loss"] * first, "a curve that falls, or it says nothing"


def write_golden(run: Path) -> None:
    within = {"val_loss": 1e-4, "grad_norm": 1e-3}
    machine = {"torch": torch.__version__, "python": platform.python_version(), "device": platform.machine()}
    tolerance = "relative, of every strategy on one and two ranks (gloo), float32, whatever the machine"
    curves = {key: rows(run, key) for key in within}
    write_json(GOLDEN, {"machine": machine, "tolerance": tolerance, "within": within, "one": curves})


def test_a_sharded_run_grows_from_one_rank_to_two(folders: dict[str, Path]) -> None:
    run = folders["grown"]
    starts = [
        event
        for event in map(json.loads, (run / "events.jsonl").read_text().splitlines())
        if event["event"] == "run_started"
    ]
    assert len(starts) == 2
    decisions = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
    assert decisions["data_parallel"]["value"] == 2
    assert decisions["batch_size"]["value"] * decisions["gradient_accumulation_steps"]["value"] == 4
    assert "began with 1 ranks and resumes with 2" in decisions["batch_size"]["reason"]
    same(run, folders["one"])


@pytest.mark.parametrize("name", ["bfloat16_sums", "fsdp2_bfloat16_sums"])
def test_gradients_that_ranks_sum_in_bfloat16_are_rounded_and_no_more(name: str, folders: dict[str, Path]) -> None:
    run, one = folders[name], folders["one"]
    assert rows(run, "val_loss") == pytest.approx(rows(one, "val_loss"), rel=5e-3)
    assert rows(run, "grad_norm") != pytest.approx(rows(one, "grad_norm"), rel=2e-5)
    assert rows(run, "grad_norm") == pytest.approx(rows(one, "grad_norm"), rel=2e-2)


def test_a_pipeline_that_was_stopped_trains_as_one_process(folders: dict[str, Path]) -> None:
    run, one = folders["pipeline"], folders["one"]
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events.count("run_started") == 2
    same(run, one, within=5e-4)
    for key in ("val_loss", "grad_norm", "update_norm", "layer_grad_norm/embedder"):
        assert rows(run, key) == pytest.approx(rows(one, key), rel=2e-4), key


def test_two_ranks_that_share_the_data_train_all_blocks_as_one_process(folders: dict[str, Path]) -> None:
    run, one = folders["blocks_data"], folders["blocks_one"]
    for phase in ("blockwise", "drift"):
        same(run, one, phase=phase)
        blocks, alone = (StageLedger(at)[phase].phase.details["blocks"] for at in (run, one))
        assert {name: ended["steps"] for name, ended in blocks.items()} == dict.fromkeys(alone, 3)


def test_a_control_that_fails_within_a_phase_ends_the_run(folders: dict[str, Path]) -> None:
    """The other ranks could not be told: recorded, the failure would have rank 0 go on without them."""
    run = folders["controls"]
    (run / "checkpoints" / "controls.random.blockwise.safetensors").mkdir(parents=True)
    try:
        with pytest.raises(OSError, match=r"controls\.random\.blockwise"):
            worker.run(run)
    finally:
        dist.destroy_process_group()


def test_a_sharded_run_goes_on_with_one_rank(folders: dict[str, Path], tmp_path: Path) -> None:
    run = folders["stopped"]
    place = latest_sharded_state(state_path(run, "pretrain"))
    assert place is not None
    assert SAVED <= int(place.name) < STEPS
    state = state_path(run, "pretrain")
    assert main(["export", str(state), "--format", "hf", "--out", str(tmp_path / "hf")]) == 0
    saved, exported = load_pretrained(place / MODEL)[0], load_pretrained(tmp_path / "hf")[0]
    for name, value in saved.state_dict().items():
        assert torch.equal(exported.state_dict()[name], value), name
    assert worker.run(run) == 0
    decisions = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
    assert decisions["gradient_accumulation_steps"]["value"] == 2
    assert "began with 2 ranks and resumes with 1" in decisions["gradient_accumulation_steps"]["reason"]
    same(run, folders["one"])


def test_a_sharded_state_is_a_checkpoint_of_its_own(folders: dict[str, Path], tmp_path: Path) -> None:
    spec = freeze(list(WORDS)).manifest.model
    place = latest_sharded_state(folders["exact"])
    assert place is not None
    out = tmp_path / "out"
    assert main(["export", str(folders["exact"]), "--format", "safetensors", "--out", str(out)]) == 0
    exported = load_tensors(out / "model.safetensors")
    model, _ = load_pretrained(place / MODEL, expected=spec)
    for name, value in build_model(spec, seed=7).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
        assert name not in exported or torch.equal(exported[name], value), name
    assert exported.keys() >= {name for name, _ in model.named_parameters()}


def test_what_does_not_fit_is_refused(folders: dict[str, Path]) -> None:
    from caramba.data.checkpoint.formats import load_sharded_state
    from caramba.experiment.resolve_plans import resize_batch

    wider = build_model(freeze([*WORDS, "model.embedder.vocab_size=600", "data.vocab_size=600"]).manifest.model)
    place = latest_sharded_state(folders["exact"])
    assert place is not None
    with pytest.raises(
        CheckpointError, match=r"another model, 1 tensors differ:\n  embedder.token.weight: expected \(600"
    ):
        load_sharded_state(place, wider, torch.optim.SGD(wider.parameters(), lr=0.1))
    phase = freeze([*WORDS, "train.batch_size=4"]).manifest.groups[0].runs[0].train
    assert phase is not None
    assert resize_batch("pretrain", phase, 2, 4) == (2, 1)
    with pytest.raises(ConfigError, match=r"a step has 8 samples .* which 3 ranks do not share evenly"):
        resize_batch("pretrain", phase, 2, 3)
    with pytest.raises(ConfigError, match="optimizer=muon is made for whole weights"):
        freeze([*WORDS, "parallel=fsdp2", "train.optimizer=muon"])
