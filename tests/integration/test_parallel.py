"""Two ranks train what one process trains: data parallel, with sharded weights, with shared blocks; a sharded run goes
on with one rank, and its state is a checkpoint of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from caramba import worker
from caramba.checkpoint import load_tensors, load_training_state
from caramba.checkpoint.sharded import MODEL, latest_sharded_state, save_sharded_state
from caramba.config.model import ModelSpec
from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.cost import model_cost
from caramba.cost.spread import Spread, holdings
from caramba.data import IGNORED
from caramba.distill import LanguageModelObjective, PipelinedObjective
from caramba.errors import CheckpointError, ConfigError
from caramba.experiment.ledger import Ledger
from caramba.launch.freeze import freeze
from caramba.model import Model, build_model, load_pretrained, spec_of
from caramba.model.sharding import fill_sharded, gathered_state, shard_model, sharding_of
from caramba.optim import build_optimizer, clip_gradients, local
from caramba.parallel import apply_tensor_parallel, cut, gather_stages, send_stages
from caramba.parallel.stages import TIED
from caramba.runs import mint
from caramba.runtime import (
    data_share,
    gather_on_main,
    get_rank,
    is_main_process,
    join_ranks,
    seed_process,
)
from caramba.train import has_saved_state, state_path
from tests.integration.commands import SMALL, SMALL_TEACHER

STEPS, SAVED = 8, 2
WORDS = (
    *SMALL,
    *("model=tiny", "train=pretrain", f"train.steps={STEPS}", "train.block_size=32", "train.lr=0.003"),
    *("train.max_grad_norm=0.5", f"train.save_every={SAVED}", "train.eval_every=4"),
    *("benchmark=none", "verify=none", "device=cpu", "logger.tensorboard=false", "settings.instrument=none"),
)
CONTROLS = "benchmark.benchmarks.0.config"
SHARDED = ("parallel=fsdp2", "train.batch_size=4")
RUNS = {
    "one": ("train.batch_size=8",),
    "ddp": ("parallel=ddp", "train.batch_size=2", "train.gradient_accumulation_steps=2"),
    "fsdp2": SHARDED,
    "bfloat16_sums": ("parallel=ddp", "parallel.reduce_dtype=bfloat16", "train.batch_size=4"),
    "fsdp2_tp": ("parallel=fsdp2_tp", "train.batch_size=8"),
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
STUDENT = ("model=tiny_dba", *SMALL_TEACHER)
PRETRAIN = PhaseConfig.model_validate({"phase": "pretrain", "steps": 1})
DISTILLED = {
    "blocks_one": (*BLOCKS, "train.gradient_accumulation_steps=2"),
    "blocks_data": (*BLOCKS, "parallel=ddp"),
    "controls": (
        *(*BLOCKS, "parallel=ddp", "benchmark=controls", "~train.phases.drift"),
        *(
            f"{CONTROLS}.{key}"
            for key in ("num_batches=1", "block_size=64", "distil=true", "controls=[random]")
        ),
    ),
}


RANKED = ("ddp", "fsdp2", "bfloat16_sums", "fsdp2_tp", "blocks_data", "stopped", "pipeline", "pipeline")
"""What two ranks run, in this order: what was stopped the first time goes on the second."""


def as_rank(rank: int, port: int) -> None:
    here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({key: str(value) for key, value in {**here, "MASTER_PORT": port}.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def end_when_saved(run_dir: Path) -> None:
    """Ask this process to stop once a state is there, as SLURM does before a time limit."""

    def watch() -> None:
        while not has_saved_state(state_path(run_dir, "pretrain")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, daemon=True).start()


def rank_main(rank: int, folders: dict[str, Path], ports: list[int]) -> None:
    torch.set_num_threads(1)
    as_rank(rank, ports[0])
    check_sharded_models(folders["exact"])
    as_rank(rank, ports[1])
    for is_tied in (False, True):
        check_stages(is_tied)
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


def check_state_of_stages(run_dir: Path) -> None:
    """The state of a pipeline holds every stage once, and each draws numbers of its own: their layers are others."""
    state = load_training_state(state_path(run_dir, "pretrain"))
    first, last = state["ranks"]
    assert not state.keys() & first.keys()
    for stage in (first, last):
        assert {"state_dict", "optimizer_states", "rng", "running_loss"} <= stage.keys()
    assert not torch.equal(first["rng"]["cpu"], last["rng"]["cpu"])
    assert first["state_dict"].keys() & last["state_dict"].keys() <= {f"model.{TIED}"}


def check_sharded_models(folder: Path) -> None:
    """A sharded model's gradients, clipping, state and gathered weights are those of the whole one."""
    spec = freeze(list(WORDS)).manifest.model
    parallel = ParallelConfig(strategy="fsdp2", dp=2)
    with join_ranks(parallel, "cpu"):
        shell = check_sharded(spec, parallel)
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        check_sharded(spec, parallel, parts=1)  # two nodes, which are replicas of each other
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        for by_sequence in (False, True):
            split = ParallelConfig(strategy="fsdp2_tp", dp=1, tp=2, sequence_parallel=by_sequence)
            check_sharded(spec, split)
        check_sharded(spec, ParallelConfig(strategy="fsdp2", dp=2, wrap=("AttentionLayer", "SwiGLULayer")))
        with pytest.raises(ConfigError, match=r"no such node; it has .*NestedTopology"):
            check_sharded(spec, ParallelConfig(strategy="fsdp2", dp=2, wrap=("Block",)))
        optimizer = torch.optim.AdamW(shell.parameters())
        optimizer.zero_grad()
        labels = {"spec": spec_of(spec).model_dump_json()}
        save_sharded_state(folder, shell, optimizer, {"global_step": 5}, step=5, labels=labels)
        check_rounded_alike()


def check_rounded_alike() -> None:
    """Ranks draw other numbers, as for dropout, and yet round the weights of which each has a copy alike."""
    for name in ("adamw", "lion"):
        weight = torch.nn.Parameter(torch.ones(64))
        phase = {"phase": "pretrain", "steps": 1, "optimizer": name, "lr": 1e-3, "stochastic_rounding": True}
        settings = PhaseConfig.model_validate({**phase, "dtype": "bfloat16", "use_amp": False})
        optimizer = build_optimizer([("topology.w", weight)], settings)
        weight.data = weight.data.bfloat16()
        seed_process(1, get_rank())
        for _ in range(2):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        ranks = [torch.empty_like(weight) for _ in range(2)]
        dist.all_gather(ranks, weight.detach())
        assert len(weight.unique()) > 1, "rounded to one side and the other"
        assert torch.equal(*ranks)


def check_stages(is_tied: bool) -> None:
    """The loss and the gradients of two stages are those of the whole model, whatever counts in which part."""
    spec = freeze([*WORDS, f"model.head.tied={is_tied}"]).manifest.model
    whole = build_model(spec, seed=7).double()
    tokens = torch.arange(6 * 16).view(6, 16)
    targets = tokens.roll(-1, 1)
    targets[:2, 3:] = IGNORED
    with join_ranks(ParallelConfig(strategy="pipeline", pp=2), "cpu"):
        stage = cut(build_model(spec, device="meta").double(), get_rank(), 2)
        assert gather_on_main(get_rank()) == ([0, 1] if is_main_process() else None)
        assert data_share(1) == (get_rank(), 2)
        assert data_share(2) == (0, 1)
        send_stages(whole if is_main_process() else None, stage, torch.device("cpu"))
        planned = holdings(PRETRAIN, model_cost(spec), Spread(ParallelConfig(strategy="pipeline", pp=2)))
        assert sum(p.numel() for p in stage.model.parameters()) == planned[get_rank()].params
        alone, staged = (
            LanguageModelObjective(whole),
            PipelinedObjective(stage, micro_batches=3, accumulation=2),
        )
        for _ in range(2):
            expected = alone.step((tokens, targets), lambda loss: (loss / 2).backward())
            found = staged.step((tokens, targets), lambda _: None)
            torch.testing.assert_close(found["loss"].double(), expected["loss"], rtol=1e-6, atol=0)
        held = staged.evaluate((tokens[:5], targets[:5]))
        torch.testing.assert_close(held["loss"].double(), alone.evaluate((tokens[:5], targets[:5]))["loss"])
        staged.join_gradients()
        norm = clip_gradients([list(whole.parameters())], 1e-3)
        own = clip_gradients(staged.clip_groups(), 1e-3, has_stages=True, copies=staged.copies())
        torch.testing.assert_close(own, norm, rtol=1e-12, atol=0)
        gradients = {name: p.grad for name, p in whole.named_parameters()}
        for name, p in stage.model.named_parameters():
            torch.testing.assert_close(p.grad, gradients[name], rtol=1e-9, atol=1e-15)
        gathered = build_model(spec, seed=8).double() if is_main_process() else None
        gather_stages(stage, gathered)
        if gathered is not None:
            for name, value in whole.state_dict().items():
                assert torch.equal(gathered.state_dict()[name], value), name


def check_sharded(spec: ModelSpec, parallel: ParallelConfig, parts: int = 2) -> Model:
    device, tokens = torch.device("cpu"), torch.arange(64).view(2, 32)
    whole, shell = build_model(spec, seed=7), build_model(spec, device="meta")
    sharding = sharding_of(parallel, device, "float32")
    if sharding.within is not None:
        apply_tensor_parallel(shell, sharding.within, split_sequence=parallel.sequence_parallel)
    shard_model(shell, sharding)
    fill_sharded(shell, whole if is_main_process() else None, device)
    for model in (whole, shell):
        hidden = model.hidden(tokens)
        model.logits(hidden).square().mean().backward()
    norms = [clip_gradients([list(model.parameters())], 1e-3) for model in (whole, shell)]
    assert torch.allclose(*norms, rtol=1e-5)
    expected = {name: p.grad for name, p in whole.named_parameters()}
    held = 0
    for name, p in shell.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), expected[name], rtol=1e-4, atol=1e-9)
        held += local(p).numel()
    spread = Spread(parallel, 2 // parallel.tp, nodes=2 // parts)
    (planned,) = holdings(PRETRAIN, model_cost(spec), spread)
    assert held == pytest.approx(planned.params, rel=0.05), "what the plan says a rank holds"
    total = sum(p.numel() for p in whole.parameters())
    assert total / parts <= held < total * (0.9 if parts > 1 else 1.1), (
        "norms and embeddings may be on all ranks"
    )
    state = gathered_state(shell)
    assert bool(state) == is_main_process()
    for name, value in state.items():
        assert torch.equal(value, whole.state_dict()[name]), name
    return shell


@pytest.fixture(scope="module")
def folders(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run directories, trained: `one` by this process, the others by two ranks; `stopped` was not let finish."""
    root = tmp_path_factory.mktemp("parallel")
    made = {}
    for name, words in RUNS.items():
        words = [*WORDS, *words, f"name={name}"]
        made[name] = mint(freeze(words).manifest, words, root)
    made["exact"] = root / "exact"
    torch.set_num_threads(1)
    assert worker.run(made["one"]) == 0
    for name, words in DISTILLED.items():
        words = [*WORDS, *STUDENT, *words, f"name={name}", f"model.teacher.checkpoint={made['one']}"]
        made[name] = mint(freeze(words).manifest, words, root)
    assert worker.run(made["blocks_one"]) == 0
    mp.spawn(rank_main, (made, [free_port() for _ in range(2 + len(RANKED))]), nprocs=2)
    return made


def rows(run: Path, key: str) -> dict[int, float]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    found = [event for event in events if event["event"] == "metrics" and key in event["values"]]
    assert len({event["step"] for event in found}) == len(found), "one writer"
    return {event["step"]: event["values"][key] for event in found}


def weights(run: Path, phase: str) -> dict[str, Tensor]:
    return load_tensors(run / "checkpoints" / f"{phase}.safetensors")


def same(run: Path, other: Path, within: float = 2e-5, phase: str = "pretrain") -> None:
    """AdamW makes a step of about lr out of any gradient: where one is near 0, rounding shows."""
    ours, theirs = weights(run, phase), weights(other, phase)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=within)


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp2_tp"])
def test_two_ranks_train_as_one_process(folders: dict[str, Path], name: str) -> None:
    run, one = folders[name], folders["one"]
    same(run, one, within=2e-4 if name == "fsdp2_tp" else 2e-5)
    keys = ("val_loss", "grad_norm", "update_norm", "layer_grad_norm/embedder")
    for key in (
        *keys,
        *(["loss"] if name != "ddp" else []),
    ):  # of the last micro-batch, of which ddp has two here
        assert rows(run, key) == pytest.approx(rows(one, key), rel=2e-4), key
    plan = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
    assert plan["data_parallel"]["value"] == (1 if name == "fsdp2_tp" else 2)
    assert not state_path(run, "pretrain").exists()


def test_gradients_that_ranks_sum_in_bfloat16_are_rounded_and_no_more(folders: dict[str, Path]) -> None:
    run, one = folders["bfloat16_sums"], folders["one"]
    assert rows(run, "val_loss") == pytest.approx(rows(one, "val_loss"), rel=5e-3)
    assert rows(run, "grad_norm") != pytest.approx(rows(one, "grad_norm"), rel=2e-5)
    assert rows(run, "grad_norm") == pytest.approx(rows(one, "grad_norm"), rel=2e-2)


def test_a_pipeline_that_was_stopped_trains_as_one_process(folders: dict[str, Path]) -> None:
    run, one = folders["pipeline"], folders["one"]
    events = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    assert events.count("run_started") == 2
    same(run, one, within=2e-4)
    for key in ("val_loss", "grad_norm", "update_norm", "layer_grad_norm/embedder"):
        assert rows(run, key) == pytest.approx(rows(one, key), rel=2e-4), key


def test_two_ranks_that_share_the_data_train_all_blocks_as_one_process(folders: dict[str, Path]) -> None:
    run, one = folders["blocks_data"], folders["blocks_one"]
    for phase in ("blockwise", "drift"):
        same(run, one, phase=phase)
        blocks, alone = (Ledger(at)[phase].phase.details["blocks"] for at in (run, one))
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


def test_a_sharded_run_goes_on_with_one_rank(folders: dict[str, Path]) -> None:
    run = folders["stopped"]
    place = latest_sharded_state(state_path(run, "pretrain"))
    assert place is not None
    assert SAVED <= int(place.name) < STEPS
    assert worker.run(run) == 0
    decisions = json.loads((run / "plan.json").read_text())["pretrain"]["decisions"]
    assert decisions["gradient_accumulation_steps"]["value"] == 2
    assert "began with 2 ranks and goes on with 1" in decisions["gradient_accumulation_steps"]["reason"]
    same(run, folders["one"])


def test_a_sharded_state_is_a_checkpoint_of_its_own(folders: dict[str, Path]) -> None:
    spec = freeze(list(WORDS)).manifest.model
    place = latest_sharded_state(folders["exact"])
    assert place is not None
    model, _ = load_pretrained(place / MODEL, expected=spec)
    for name, value in build_model(spec, seed=7).state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


def test_what_does_not_fit_is_refused(folders: dict[str, Path]) -> None:
    from caramba.checkpoint.sharded import load_sharded_state
    from caramba.experiment.world_size import resized

    wider = build_model(
        freeze([*WORDS, "model.embedder.vocab_size=600", "data.vocab_size=600"]).manifest.model
    )
    place = latest_sharded_state(folders["exact"])
    assert place is not None
    with pytest.raises(
        CheckpointError, match=r"another model, 1 tensors differ:\n  embedder.token.weight: expected \(600"
    ):
        load_sharded_state(place, wider, torch.optim.SGD(wider.parameters(), lr=0.1))
    phase = freeze([*WORDS, "train.batch_size=4"]).manifest.groups[0].runs[0].train
    assert phase is not None
    assert resized("pretrain", phase, 2, 4) == (2, 1)
    with pytest.raises(ConfigError, match=r"a step has 8 samples .* which 3 ranks do not share evenly"):
        resized("pretrain", phase, 2, 3)
    with pytest.raises(ConfigError, match="optimizer=muon is made for whole weights"):
        freeze([*WORDS, "parallel=fsdp2", "train.optimizer=muon"])
