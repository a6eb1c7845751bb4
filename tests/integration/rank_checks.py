"""What ranks that have been started hold of a model, checked by themselves: shards, stages, sums and rounding."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from caramba.config.estimate import model_cost
from caramba.config.estimate.memory import ParallelLayout, holdings
from caramba.config.model import ModelSpec
from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.data import IGNORED
from caramba.data.checkpoint.formats import save_sharded_state
from caramba.data.checkpoint.network import spec_of
from caramba.distill import LanguageModelObjective, PipelinedObjective
from caramba.errors import ConfigError
from caramba.model import Model, build_model
from caramba.model.parallel import apply_tensor_parallel, gather_stages, send_stages, split_stage
from caramba.model.sharding import fill_sharded, gather_state, shard_model, sharding_of
from caramba.optim import build_optimizer, clip_gradients, local
from caramba.runtime import (
    data_share,
    gather_on_main,
    get_rank,
    is_main_process,
    join_ranks,
    seed_process,
)

PRETRAIN = PhaseConfig.model_validate({"phase": "pretrain", "steps": 1})


def check_sharded_models(folder: Path, spec: ModelSpec) -> None:
    """A sharded model's gradients, clipping, state and gathered weights are those of the whole one."""
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


def check_stages(spec: ModelSpec) -> None:
    """The loss and the gradients of two stages are those of the whole model, whatever counts in which part."""
    whole = build_model(spec, seed=7).double()
    tokens = torch.arange(6 * 16).view(6, 16)
    targets = tokens.roll(-1, 1)
    targets[:2, 3:] = IGNORED
    with join_ranks(ParallelConfig(strategy="pipeline", pp=2), "cpu"):
        stage = split_stage(build_model(spec, device="meta").double(), get_rank(), 2)
        assert gather_on_main(get_rank()) == ([0, 1] if is_main_process() else None)
        assert data_share(1) == (get_rank(), 2)
        assert data_share(2) == (0, 1)
        send_stages(whole if is_main_process() else None, stage, torch.device("cpu"))
        planned = holdings(PRETRAIN, model_cost(spec), ParallelLayout(ParallelConfig(strategy="pipeline", pp=2)))
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
        own = clip_gradients(staged.clip_groups(), 1e-3, has_stages=True, copies=staged.replicated_params())
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
    spread = ParallelLayout(parallel, 2 // parallel.tp, nodes=2 // parts)
    (planned,) = holdings(PRETRAIN, model_cost(spec), spread)
    assert held == pytest.approx(planned.params, rel=0.05), "what the plan says a rank holds"
    total = sum(p.numel() for p in whole.parameters())
    assert total / parts <= held < total * (0.9 if parts > 1 else 1.1), "norms and embeddings may be on all ranks"
    state = gather_state(shell)
    assert bool(state) == is_main_process()
    for name, value in state.items():
        assert torch.equal(value, whole.state_dict()[name]), name
    return shell
