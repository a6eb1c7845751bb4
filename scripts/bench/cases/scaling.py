"""Weak scaling of a 1B pretraining step over the GPUs of a machine, by strategy, and their loss curves. Writes JSON.

Usage, once per number of devices: torchrun --nproc-per-node N scripts/bench/run.py scaling --out scaling_N.json
and then: python scripts/bench/run.py scaling --merge scaling_1.json scaling_2.json ...
(files of other commits too: a row is compared with `single` of its own sitting; `FILE:single,fsdp2` takes some rows).
`--size tiny --device cpu --steps 12 --batch 2 --block 32 --no-compile` shows that the script works. Every rank has the
same batch, whatever their number; strategies of one number of ranks see the same samples from the same weights, so
that their losses agree: a merge exits with 1 when they do not.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from merge_runs import merge_sittings
from models import spec_of
from plots import draw_scaling
from record import Record, machine_facts
from verdicts import losses_apart, scaling_verdicts

from caramba import kernels
from caramba.config.estimate import estimate_phase, model_cost
from caramba.config.manifest import Manifest, parse_manifest
from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.experiment.planning.trial import RandomWindows
from caramba.layer import attention_backends
from caramba.model import build_model, build_with_random_weights
from caramba.model.sharding import fill_sharded, shard_model, sharding_of
from caramba.runtime import (
    choose_attention,
    get_world_size,
    is_main_process,
    join_ranks,
    plan,
    release_memory,
)
from caramba.train import SHARDED, PhaseData, fit, strategy_for

MUST = {"ddp": 0.93, "fsdp2": 0.90, "losses_within": 5e-3}
"""Shares of linear scaling, and how far losses of equal steps may differ: products of autocast are in bfloat16."""
OPTIONS = (
    """--size=1b|8b|tiny --strategies= --batch=8 --block=2048 --steps=40 --no-compile --sitting= --merge=*"""
)
SMOKE_OPTIONS = """--size tiny --device cpu --steps 2 --batch 1 --block 16 --no-compile --strategies single"""


class Losses(pl.Callback):
    """Keeps the loss of every step, the mean over ranks."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: object, module: Any, outputs: Any, *_: object) -> None:
        self.kept.append(outputs["loss"].detach().clone())


def strategy_of(word: str) -> tuple[str, dict[str, Any]]:
    """Return a strategy and its settings, as of `ddp+bucket_cap_mb=100`."""
    strategy, *settings = word.split("+")
    pairs = (setting.split("=", 1) for setting in settings)
    return strategy, {key: yaml.safe_load(value) for key, value in pairs}


def manifest_of(words: argparse.Namespace, strategy: str, settings: dict[str, Any]) -> Manifest:
    sizes = {"steps": words.steps, "batch_size": words.batch, "block_size": words.block}
    phase = {"phase": "pretrain", "trains": "student", "lr": 3e-4, "scheduler": "constant", **sizes}
    phase["compile_model"] = not words.no_compile
    data = {"type": "tokens", "path": "random.npy"}
    group = {"name": "main", "data": data, "runs": [{"id": "pretrain", "train": phase}]}
    parallel = {"strategy": strategy, **settings}
    quiet = {"settings": {"instrument": "none"}, "logger": {"tensorboard": False}}
    model = spec_of(words.size)
    return parse_manifest(
        {
            "name": "scaling",
            "device": words.device,
            "model": model,
            "groups": [group],
            "parallel": parallel,
            **quiet,
        }
    )


def train(manifest: Manifest, device: torch.device) -> dict[str, Any]:
    """Train a phase on the ranks that are joined; return what it measured, with the loss of every step."""
    phase = manifest.groups[0].runs[0].train
    assert isinstance(phase, PhaseConfig)
    ops = kernels.load(device)
    ranks = get_world_size() if manifest.parallel.strategy != "single" else 1
    attention = choose_attention(device)
    about = {"device": manifest.device, "ops": ops, "attention": attention, "ranks": ranks}
    decided = plan(phase, kernels="auto", name="scaling", **about)
    whole = build_with_random_weights(manifest.model, device)
    shard = None
    trained = whole
    if strategy_for(manifest.parallel, phase) == SHARDED:
        trained = build_model(manifest.model, device="meta")
        whole.to("cpu")
        shell, source = trained, whole if int(os.environ.get("RANK", "0")) == 0 else None

        def shard() -> None:
            shard_model(shell, sharding_of(manifest.parallel, device, decided.value("dtype")))
            fill_sharded(shell, source, device)

    windows = RandomWindows(4096, phase.block_size, manifest.model.embedder.vocab_size, False)
    losses = Losses()
    objective = LanguageModelObjective(trained)
    objective.is_sharded = shard is not None
    with tempfile.TemporaryDirectory() as folder, attention_backends(device, attention):
        outcome = fit(
            objective,
            phase,
            PhaseData(windows, windows, seed=1, start=0),
            decided,
            manifest=manifest,
            run_dir=Path(folder),
            save_final=lambda: None,
            flops_per_token=estimate_phase(phase, model_cost(manifest.model), None).flops_per_token,
            shard=shard,
            callbacks=[losses],
        )
    kept = [float(loss) for loss in losses.kept]
    return {**outcome.measured, "losses": kept, "compiled": bool(phase.compile_model)}


def facts(device: torch.device) -> dict[str, Any]:
    """Return what sittings that are merged must have in common, and the commit."""
    nccl = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else {}
    known = machine_facts(device)
    return {key: known[key] for key in ("device", "torch", "python", "commit") if key in known} | nccl


def measure(words: argparse.Namespace, record: Record) -> int:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    shape = {"size": words.size, "batch": words.batch, "block": words.block, "steps": words.steps}
    sitting = {"sitting": words.sitting} if words.sitting else {}
    record.start(facts(record.device) | sitting, **shape, must=MUST)
    every = "single,fsdp2" if world == 1 else "ddp,fsdp2"  # ddp of one device is a single process
    for word in (words.strategies or every).split(","):
        strategy, settings = strategy_of(word)
        manifest = manifest_of(words, strategy, settings)
        with join_ranks(manifest.parallel, words.device):
            measured = train(manifest, record.device)
            if is_main_process():
                record.add({"strategy": strategy, "devices": world, "settings": settings, **measured})
        torch.compiler.reset()
        release_memory()
    if record.data.get("rows"):
        print("\n".join(scaling_verdicts(record.data)), flush=True)
    return 0


def merge(files: list[str], record: Record) -> int:
    """Merge the rows of several device counts and sittings into one file, with a plot next to it.

    Return 1 when they are of different machines or shapes, or when losses of strategies are not as near as they must
    be, whichever sitting they are of: seeds and samples are the same.
    """
    try:
        record.data = {**merge_sittings(files), "must": MUST}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if plot := record.write_plot(draw_scaling(record.data)):
        record.data["plot"] = plot
    record.save()
    print("\n".join(scaling_verdicts(record.data)))
    return 0 if losses_apart(record.data) <= MUST["losses_within"] else 1


def run(words: argparse.Namespace, record: Record) -> int:
    return merge(words.merge, record) if words.merge else measure(words, record)
