"""A training step of a model on one device and of the same model split over all (tensor parallel). Writes JSON.

Usage: torchrun --nproc-per-node 2 scripts/bench/run.py tensor_parallel_step [--out FILE.json]
`--size tiny --device cpu --block 32 --forms eager` shows that the script works. Rank 0 measures one device while the
others wait. Weights, gradients and AdamW's states are bfloat16, so that 8B fit one GPU; a run keeps float32 ones under
parallel=fsdp2_tp, and what is measured here is its split of the layers alone. The file is written after every row, rows
come in order of worth, and none is begun that would not end within --budget-s if it took as long as the longest yet.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from cases.scaling import facts
from merge_runs import merge_sittings
from models import spec_of
from record import Record
from torch._dynamo import config as dynamo_config
from torch.distributed.device_mesh import init_device_mesh

from caramba import kernels
from caramba.config.model import ModelSpec
from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.layer import attention_backends
from caramba.lower.lowering import lower
from caramba.model import build_with_random_weights
from caramba.model.parallel import apply_tensor_parallel
from caramba.optim import build_optimizer, clip_gradients
from caramba.runtime import (
    choose_attention,
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
        spec = ModelSpec.model_validate(spec_of(words.size))
        model = build_with_random_weights(spec, device).bfloat16()
        release_memory()
        if row["devices"] > 1:
            mesh = init_device_mesh(device.type, (row["devices"],), mesh_dim_names=("tp",))
            apply_tensor_parallel(model, mesh, split_sequence=row["sequence_parallel"])
            release_memory()
        self.objective = LanguageModelObjective(model)
        self.objective.is_sharded = row["devices"] > 1
        self.objective.checkpoint(row["checkpointing"])
        lower(model, device, "train", is_compiled=row["form"] == "compiled")
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
    step_s, tokens = statistics.median(seconds), words.batch * words.block
    losses, norms = zip(*taken, strict=True)
    times = {"step_s": step_s, "all_s": seconds, "tokens_per_s": tokens / step_s, "ready_s": ready}
    return {**row, **times, "losses": losses, "grad_norms": norms, **peak}


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


def broadcast_int(value: int) -> int:
    """Return rank 0's number on every rank, which waits for it as long as it takes."""
    said = torch.tensor(value)
    dist.broadcast(said, src=0)
    return int(said)


def rows_of(words: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what to measure: one device and all in every form, and then what else all can do."""
    world, forms = get_world_size(), words.forms
    shapes = [(form, devices, False) for form in forms for devices in (1, world)]
    shapes += [(form, world, True) for form in reversed(forms)]
    if words.rows is not None:
        shapes = [shapes[int(index)] for index in str(words.rows).split(",")]
    names = ("form", "devices", "sequence_parallel")
    return [dict(zip(names, shape, strict=True), checkpointing="none") for shape in shapes]


def measure_rows(words: argparse.Namespace, record: Record) -> None:
    head = {key: getattr(words, key) for key in ("size", "batch", "block", "steps")}
    record.start(facts(record.device), **head, rows=[], left_out=[])
    mode, longest = 0, {"eager": 0.0, "compiled": COMPILING_S}
    for row in rows_of(words):
        at = time.monotonic()
        if not broadcast_int(int(at - record.began + longest[row["form"]] < words.budget_s)):
            record.data["left_out"].append(row)
            continue
        row["checkpointing"] = CHECKPOINTING[mode]
        made = None
        if row["devices"] > 1:
            made = measure(words, record.device, row)
        elif is_main_process():
            made = on_one(words, record.device, row)
        mode = broadcast_int(CHECKPOINTING.index(made["checkpointing"]) if made is not None else 0)
        release_memory()
        torch.compiler.reset()
        longest[row["form"]] = max(longest[row["form"]], time.monotonic() - at)
        if is_main_process():
            assert made is not None
            record.add(made)
    if is_main_process():
        record.save()


OPTIONS = """--size=8b|1b|tiny --batch=1 --block=8192 --warm-up=2 --steps=5 --forms=eager,compiled --rows=
    --budget-s=105.0 --merge=*"""


def run(words: argparse.Namespace, record: Record) -> None:
    if words.merge:
        record.data = merge_sittings(words.merge)
        return record.save()
    parallel = ParallelConfig(strategy="fsdp2_tp", dp=1, tp=int(os.environ.get("WORLD_SIZE", "1")))
    with join_ranks(parallel, words.device):
        kernels.load(record.device)
        with attention_backends(record.device, choose_attention(record.device)):
            measure_rows(words, record)
    return None
