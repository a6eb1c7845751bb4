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
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from merge_runs import merge_sittings
from plots import draw_scaling
from record import Record, commit_here
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
from caramba.runtime import choose_attention, choose_device, get_world_size, join_ranks, plan
from caramba.train import SHARDED, PhaseData, fit, strategy_for

# d_model, layers, heads, key/value heads, d_ff, vocabulary: the others are Llama 3.2 1B's and Llama 3.1 8B's.
SIZES = {
    "tiny": (64, 2, 4, 2, 128, 256),
    "1b": (2048, 16, 32, 8, 8192, 128256),
    "8b": (4096, 32, 32, 8, 14336, 128256),
}
MUST = {"ddp": 0.93, "fsdp2": 0.90, "losses_within": 5e-3}
"""Shares of linear scaling, and how far losses of equal steps may differ: products of autocast are in bfloat16."""


class Losses(pl.Callback):
    """Keeps the loss of every step, the mean over ranks."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer: object, module: Any, outputs: Any, *_: object) -> None:
        self.kept.append(outputs["loss"].detach().clone())


def spec_of_size(size: str) -> dict[str, Any]:
    d_model, n_layers, n_heads, n_kv_heads, d_ff, vocab = SIZES[size]
    norm = {"type": "RMSNormLayer", "d_model": d_model}
    heads = {"mode": "gqa", "n_heads": n_heads, "n_kv_heads": n_kv_heads}
    attention = {"type": "AttentionLayer", "d_model": d_model, **heads}
    mlp = {"type": "SwiGLULayer", "d_model": d_model, "d_ff": d_ff}
    layers = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (attention, mlp)]
    nested = {"type": "NestedTopology", "layers": layers, "repeat": n_layers}
    return {
        "type": "TransformerModel",
        "embedder": {"vocab_size": vocab, "d_model": d_model},
        "topology": {"type": "StackedTopology", "layers": [nested, norm]},
        "head": {"tied": size != "8b"},
    }


def strategy_of(word: str) -> tuple[str, dict[str, Any]]:
    """Return a strategy and its settings, as of `ddp+bucket_cap_mb=100`."""
    strategy, *settings = word.split("+")
    pairs = (setting.split("=", 1) for setting in settings)
    return strategy, {key: yaml.safe_load(value) for key, value in pairs}


def manifest_of(words: argparse.Namespace, strategy: str, settings: dict[str, Any], device: str) -> Manifest:
    phase = {
        "phase": "pretrain",
        "trains": "student",
        "steps": words.steps,
        "batch_size": words.batch,
        "block_size": words.block,
        "lr": 3e-4,
        "scheduler": "constant",
        "compile_model": words.compile,
    }
    group = {
        "name": "main",
        "data": {"type": "tokens", "path": "random.npy"},
        "runs": [{"id": "pretrain", "train": phase}],
    }
    spec = spec_of_size(words.size)
    return parse_manifest(
        {
            "name": "scaling",
            "device": device,
            "model": spec,
            "groups": [group],
            "parallel": {"strategy": strategy, **settings},
            "settings": {"instrument": "none"},
            "logger": {"tensorboard": False},
        }
    )


def train(manifest: Manifest, device: torch.device) -> dict[str, Any]:
    """Train a phase on the ranks that are joined; return what it measured, with the loss of every step."""
    phase = manifest.groups[0].runs[0].train
    assert isinstance(phase, PhaseConfig)
    ops = kernels.load(device)
    ranks = get_world_size() if manifest.parallel.strategy != "single" else 1
    attention = choose_attention(device)
    decided = plan(
        phase,
        device=manifest.device,
        kernels="auto",
        ops=ops,
        name="scaling",
        attention=attention,
        ranks=ranks,
    )
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
    found: dict[str, Any] = {"device": platform.machine(), "torch": torch.__version__}
    if device.type == "cuda":
        found |= {
            "device": torch.cuda.get_device_name(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    found["python"] = platform.python_version()
    return found | commit_here()


def measure(words: argparse.Namespace, record: Record) -> int:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(words.device)
    rows = []
    strategies = (
        words.strategies.split(",")
        if words.strategies
        else (["single"] if world == 1 else []) + ["ddp", "fsdp2"]
    )
    for word in strategies:
        strategy, settings = strategy_of(word)
        if strategy == "ddp" and world == 1:
            continue  # which is a single process
        manifest = manifest_of(words, strategy, settings, words.device)
        with join_ranks(manifest.parallel, words.device):
            measured = train(manifest, device)
        rows.append({"strategy": strategy, "devices": world, "settings": settings, **measured})
        if int(os.environ.get("RANK", "0")) == 0:
            shown = {key: value for key, value in rows[-1].items() if key != "losses"}
            print(
                json.dumps(shown),
                f"loss {measured['losses'][0]:.6f} -> {measured['losses'][-1]:.6f}",
                flush=True,
            )
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if int(os.environ.get("RANK", "0")) == 0:
        shape = {"size": words.size, "batch": words.batch, "block": words.block, "steps": words.steps}
        head = {
            **record.head(facts(device) | ({"sitting": words.sitting} if words.sitting else {})),
        }
        data = {**head, **shape, "must": MUST, "rows": rows}
        record.write_data(data)
        print("\n".join(scaling_verdicts(data)), flush=True)
    return 0


def merge(files: list[str], record: Record) -> int:
    """Merge the rows of several device counts and sittings into one file, with a plot next to it.

    Return 1 when they are of different machines or shapes, or when losses of strategies are not as near as they must
    be, whichever sitting they are of: seeds and samples are the same.
    """
    try:
        data = {**merge_sittings(files), "must": MUST}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if (image := draw_scaling(data)) is not None:
        data["plot"] = record.write_plot(image)
    record.write_data(data)
    print("\n".join(scaling_verdicts(data)))
    return 0 if losses_apart(data) <= MUST["losses_within"] else 1


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="1b", choices=tuple(SIZES))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument(
        "--strategies", help="some of single,ddp,fsdp2, with settings as ddp+bucket_cap_mb=100; else all"
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--block", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument(
        "--sitting", help="what rows are compared within, where one commit has several sittings"
    )
    parser.add_argument(
        "--merge", nargs="+", metavar="FILE[:STRATEGY,...]", help="of one sitting or of several"
    )


def run(words: argparse.Namespace, record: Record) -> int | None:
    return merge(words.merge, record) if words.merge else measure(words, record)
