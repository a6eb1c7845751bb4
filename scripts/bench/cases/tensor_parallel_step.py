"""A training step of a model on one device and of the same model split over all (tensor parallel). Writes JSON.

Usage: torchrun --nproc-per-node 2 scripts/bench/run.py tensor_parallel_step [--out FILE.json]
`--size tiny --device cpu --block 32 --forms eager` shows that the script works. Rank 0 measures one device while the
others wait. Weights, gradients and AdamW's states are bfloat16, so that 8B fit one GPU; a run keeps float32 ones under
parallel=fsdp2_tp, and what is measured here is its split of the layers alone. The file is written after every row, rows
come in order of worth, and none is begun that would not end within --budget-s if it took as long as the longest yet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from cases.scaling import SIZES, facts, spec_of_size
from merge_runs import merge_sittings
from record import Record
from torch._dynamo import config as dynamo_config
from torch.distributed.device_mesh import init_device_mesh

from caramba import kernels
from caramba.config.model import ModelSpec
from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.layer import attention_backends
from caramba.model import build_with_random_weights
from caramba.optim import build_optimizer, clip_gradients
from caramba.parallel import apply_tensor_parallel
from caramba.runtime import (
    choose_attention,
    choose_device,
    get_world_size,
    is_main_process,
    is_out_of_memory,
    join_ranks,
    release_memory,
    synchronize,
)
from caramba.train.callbacks.compiling import RECOMPILE_LIMIT

CHECKPOINTING = ("none", "selective", "full")
COMPILING_S = 25.0
"""What the first compiled row is expected to take."""
BFLOAT16 = {"dtype": "bfloat16", "use_amp": False}


class Step:
    """A training step at a shape: forward, backward, clipping and AdamW, all weights and states in bfloat16."""

    def __init__(self, words: argparse.Namespace, device: torch.device, row: dict[str, Any]) -> None:
        spec = ModelSpec.model_validate(spec_of_size(words.size))
        model = build_with_random_weights(spec, device).bfloat16()
        release_memory()
        if row["devices"] > 1:
            mesh = init_device_mesh(device.type, (row["devices"],), mesh_dim_names=("tp",))
            apply_tensor_parallel(model, mesh, split_sequence=row["sequence_parallel"])
            release_memory()
        self.objective = LanguageModelObjective(model)
        self.objective.is_sharded = row["devices"] > 1
        self.objective.checkpoint(row["checkpointing"])
        if row["form"] == "compiled":
            dynamo_config.recompile_limit = max(dynamo_config.recompile_limit, RECOMPILE_LIMIT)
            for region in self.objective.compilable():
                region.forward = torch.compile(region.forward)
        phase = {"phase": "pretrain", "steps": 1, "lr": 1e-4, "block_size": words.block, **BFLOAT16}
        self.optimizer = build_optimizer(self.objective.trainable(), PhaseConfig.model_validate(phase))
        generator = torch.Generator().manual_seed(0)
        shape = (words.batch, words.block + 1)
        windows = torch.randint(spec.embedder.vocab_size, shape, generator=generator).to(device)
        self.batch = (windows[:, :-1].contiguous(), windows[:, 1:].contiguous())

    def __call__(self) -> tuple[float, float]:
        """Take the step; return its loss and the norm of its gradients."""
        loss = self.objective.step(self.batch, lambda loss: loss.backward())["loss"]
        norm = clip_gradients(self.objective.clip_groups(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss), float(norm)


def measure(words: argparse.Namespace, device: torch.device, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with losses and gradients' norms, seconds of steps after warm-up, and this rank's peak of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    step = Step(words, device, row)
    taken = [step() for _ in range(words.warm_up)]
    ready = time.perf_counter() - began
    seconds = []
    for _ in range(words.steps):
        synchronize(device)
        at = time.perf_counter()
        taken.append(step())
        synchronize(device)
        seconds.append(time.perf_counter() - at)
    peak = {"peak_allocated_bytes": torch.cuda.max_memory_allocated()} if device.type == "cuda" else {}
    median = statistics.median(seconds)
    tokens = words.batch * words.block
    losses, norms = zip(*taken, strict=True)
    return {
        **row,
        "step_s": median,
        "all_s": seconds,
        "tokens_per_s": tokens / median,
        "ready_s": ready,
        "losses": losses,
        "grad_norms": norms,
        **peak,
    }


def on_one(words: argparse.Namespace, device: torch.device, row: dict[str, Any]) -> dict[str, Any]:
    """Measure one device with the least activation checkpointing that fits it."""
    for mode in CHECKPOINTING[CHECKPOINTING.index(row["checkpointing"]) :]:
        try:
            return measure(words, device, {**row, "checkpointing": mode})
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            print(f"checkpointing={mode}: {str(error).splitlines()[0]}", flush=True)
        release_memory()
    raise SystemExit("one device does not hold this step; use a smaller --block or --size")


def told(value: int) -> int:
    """Return rank 0's number on every rank, which waits for it as long as it takes."""
    said = torch.tensor(value)
    dist.broadcast(said, src=0)
    return int(said)


def rows_of(words: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what to measure: one device and all in every form, and then what else all can do."""
    world, forms = get_world_size(), words.forms.split(",")
    shapes = [(form, devices, False) for form in forms for devices in (1, world)]
    shapes += [(form, world, True) for form in reversed(forms)]
    if words.rows is not None:
        shapes = [shapes[int(index)] for index in words.rows.split(",")]
    names = ("form", "devices", "sequence_parallel")
    return [dict(zip(names, shape, strict=True), checkpointing="none") for shape in shapes]


def measure_rows(words: argparse.Namespace, device: torch.device, record: Record) -> None:
    head = {
        **record.head(facts(device)),
        **{key: getattr(words, key) for key in ("size", "batch", "block", "steps")},
    }
    began, found, left_out, mode = time.monotonic(), [], [], 0
    longest: dict[str, float] = {}
    for row in rows_of(words):
        at = time.monotonic()
        needs = longest.get(row["form"], COMPILING_S if row["form"] == "compiled" else 0.0)
        if not told(int(at - began + needs < words.budget_s)):
            left_out.append(row)
            continue
        row["checkpointing"] = CHECKPOINTING[mode]
        made = None
        if row["devices"] > 1:
            made = measure(words, device, row)
        elif is_main_process():
            made = on_one(words, device, row)
        mode = told(CHECKPOINTING.index(made["checkpointing"]) if made is not None else 0)
        release_memory()
        torch.compiler.reset()
        longest[row["form"]] = max(longest.get(row["form"], 0.0), time.monotonic() - at)
        if is_main_process():
            assert made is not None
            found.append(made)
            shown = {key: value for key, value in made.items() if key != "all_s"}
            print(json.dumps(shown), flush=True)
            record.write_data({**head, "rows": found, "left_out": left_out})
    if is_main_process():
        record.write_data({**head, "rows": found, "left_out": left_out})


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="8b", choices=tuple(SIZES))
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--block", type=int, default=8192)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--forms", default="eager,compiled")
    parser.add_argument("--rows", help="some of the rows, by their places from 0, as in 0,3; else all")
    parser.add_argument("--budget-s", type=float, default=105.0, help="seconds in which rows have to end")
    parser.add_argument("--merge", nargs="+", metavar="FILE", help="put files of several sittings into --out")


def run(words: argparse.Namespace, record: Record) -> int | None:
    if words.merge:
        record.write_data(merge_sittings(words.merge))
        return 0
    device = choose_device(words.device)
    parallel = ParallelConfig(strategy="fsdp2_tp", dp=1, tp=int(os.environ.get("WORLD_SIZE", "1")))
    with join_ranks(parallel, words.device):
        kernels.load(device)
        with attention_backends(device, choose_attention(device)):
            measure_rows(words, device, record)
    return 0
