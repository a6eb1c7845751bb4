"""What a blockwise step costs against one headless teacher forward, concurrent against sequential, and where it goes.

Random weights of a preset serve, as cost does not depend on them. Variants take turns, so drift of the machine hits
all, and each repeat's ratio is taken to the headless forward of the same repeat.
`maps` leaves W_q and W_o as they are (a latent student), `attention KL` adds 0.1 KL(A_t || A_s) on 64 queries,
`drift` reads the student's own states, and `naive` is one block a step with full teacher and student forwards, heads
included. The split of a step is timed between marks, by device events on a GPU.

Usage: python scripts/bench/run.py blockwise_cost [--model tiny_dba] [--batch 8] [--block 128] [--repeats 10] [--amp]
    [--compile] [--only NAME ...] [--out FILE] [OVERRIDE ...]
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from record import Record
from registry import check_names
from timing import interleave, wall_seconds

from caramba import kernels
from caramba.distill import BlockSchedule, BlockwiseObjective, capture_attention_io, relative_l1
from caramba.launch.freeze import freeze
from caramba.layer import attention_backends
from caramba.lower.lowering import lower
from caramba.model import Model, Trace, build_model
from caramba.optim import clip_gradients
from caramba.runtime import synchronize
from caramba.surgery import pair_attention

WARM_UP = 2
PARTS: tuple[str, ...] = ("teacher", "student forward", "backward", "optimiser")
OUT = None
OPTIONS = "--model=tiny_dba --batch=8 --block=128 --repeats=10 --amp --compile --only=* overrides*"
SMOKE_OPTIONS = "--repeats 1 --batch 1 --block 16 --device cpu"


class Bench:
    """Teacher, student and one optimiser, and the steps to time on them."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        manifest = freeze([f"model={args.model}", "train=pretrain", *args.overrides]).manifest
        described = manifest.model.teacher
        assert described is not None
        assert described.manifest is not None
        self.teacher: Model = build_model(described.manifest, seed=1).to(device).eval().requires_grad_(False)
        self.student: Model = build_model(manifest.model, seed=2).to(device)
        if args.amp:
            self.teacher = copy.deepcopy(self.teacher).to(torch.bfloat16)
        self.pairs = pair_attention(self.teacher, self.student)
        self.device = device
        self.tokens = torch.randint(manifest.model.embedder.vocab_size, (args.batch, args.block), device=device)
        self.objectives = {
            "all": self.objective(),
            "attention KL": self.objective(attention_weight=0.1),
            "drift": self.objective(on_student=True),
        }
        if all(layer.config.is_latent for _, _, layer in self.pairs):
            self.objectives["maps"] = self.objective(keeps_copied=True)
        self.sequential = [
            self.objective(schedule=BlockSchedule([name], steps=10**9, is_sequential=True)) for name, _, _ in self.pairs
        ]
        lower(self.teacher, device, "prefill", is_compiled=args.compile)
        lower(self.student, device, "train", is_compiled=args.compile)
        if args.compile:
            # Every kind of step and every place of a naive one is a graph of its own.
            torch._dynamo.config.recompile_limit = 64
            # Variants differ in what they train, which torch before 2.12 does not look at otherwise (pytorch#139476).
            torch._dynamo.config.skip_tensor_guards_with_matching_dict_tags = False
            layers = [layer for _, source, target in self.pairs for layer in (source, target)]
            heads = [module for each in [*self.objectives.values(), *self.sequential] for module in each.compilable()]
            for module in dict.fromkeys([*layers, *heads]):
                module.forward = torch.compile(module.forward)
        trained = [parameter for _, parameter in self.objectives["all"].trainable()]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def objective(self, **how: Any) -> BlockwiseObjective:
        return BlockwiseObjective(self.student, self.teacher, self.pairs, **how)

    def step(self, objective: BlockwiseObjective, mark: Callable[[str], None] = lambda _part: None) -> None:
        """One step as a run makes it; `mark` gets the name of the part that ended."""

        def backward(loss: torch.Tensor) -> None:
            mark("student forward")
            loss.backward()
            mark("backward")

        objective.step((self.tokens, self.tokens), backward)
        mark("teacher")
        clip_gradients(objective.clip_groups(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        mark("optimiser")

    def train_only(self, objective: BlockwiseObjective) -> None:
        """Leave gradients to what the objective trains, as the start of a phase does."""
        chosen = {id(parameter) for _, parameter in objective.trainable()}
        for parameter in self.student.parameters():
            parameter.requires_grad_(id(parameter) in chosen)

    @torch.no_grad()
    def headless(self) -> None:
        self.teacher.hidden(self.tokens)

    def run_truncated(self) -> None:
        layers = [(name, source) for name, source, _ in self.pairs]
        capture_attention_io(self.teacher, layers, self.tokens, lambda *_: None)

    def naive(self) -> None:
        """A step of every block, each with full forwards of both models."""
        for _, source, target in self.pairs:
            self.student.requires_grad_(False)
            target.requires_grad_(True)
            with torch.no_grad(), Trace(self.teacher, lambda _n, m, it=source: m is it) as theirs:
                self.teacher(self.tokens)
            with Trace(self.student, lambda _n, m, it=target: m is it, detach=False) as ours:
                self.student(self.tokens)
            relative_l1(ours.outputs[0], theirs.outputs[0]).backward()
            clip_gradients([list(target.parameters())], 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def run_marked(self, objective: BlockwiseObjective, mark: Callable[[str], None]) -> None:
        """One step; `mark` also gets the teacher's parts, which end where a student layer starts."""
        hooks = [step.register_forward_pre_hook(lambda *_: mark("teacher")) for step in objective.steps.values()]
        self.step(objective, mark)
        for hook in hooks:
            hook.remove()

    def split(self, objective: BlockwiseObjective) -> dict[str, float]:
        """Milliseconds of one step by part."""
        marks: list[tuple[str, Any]] = []

        def mark(part: str) -> None:
            if self.device.type == "cuda":
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                marks.append((part, event))
            else:
                synchronize(self.device)
                marks.append((part, time.perf_counter()))

        synchronize(self.device)
        mark("start")
        self.run_marked(objective, mark)
        synchronize(self.device)
        spent = dict.fromkeys(PARTS, 0.0)
        for (_, before), (part, after) in itertools.pairwise(marks):
            is_event = self.device.type == "cuda"
            spent[part] += before.elapsed_time(after) if is_event else 1000 * (after - before)
        return spent

    def variants(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name; the first is what the others are compared with."""

        return {
            "headless teacher forward": self.headless,
            "truncated teacher forward": self.run_truncated,
            **{
                f"concurrent, {name}": functools.partial(self.step, objective)
                for name, objective in sorted(self.objectives.items())
            },
            "sequential, a step of each block": lambda: [self.step(item) for item in self.sequential],
            "naive, a step of each block": self.naive,
        }


def measure(bench: Bench, words: argparse.Namespace, record: Record) -> None:
    """Put the milliseconds and peak bytes of every variant, and the parts of a step by objective, into the record."""
    variants, is_cuda = bench.variants(), bench.device.type == "cuda"
    check_names("--only", words.only, variants)
    first = next(iter(variants))
    chosen = {name: call for name, call in variants.items() if name in (words.only or variants) or name == first}
    peaks: dict[str, int] = {}

    def milliseconds(name: str) -> float:
        bench.train_only(bench.objectives.get(name.removeprefix("concurrent, "), bench.objectives["all"]))
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = wall_seconds(chosen[name], bench.device)
        if is_cuda:
            peaks[name] = torch.cuda.max_memory_allocated()
        return 1000 * seconds

    def split(name: str) -> Any:
        bench.train_only(bench.objectives[name])
        return bench.split(bench.objectives[name])

    turns = {"repeats": words.repeats, "warm": WARM_UP}
    times = interleave({name: functools.partial(milliseconds, name) for name in chosen}, **turns)
    objectives = [name for name in bench.objectives if name != "drift" and f"concurrent, {name}" in chosen]
    splits: dict[str, Any] = interleave({name: functools.partial(split, name) for name in objectives}, **turns)
    parts = {name: {part: [one[part] for one in found] for part in PARTS} for name, found in splits.items()}
    record.save(ms=times, parts_ms=parts, peak_memory_bytes=peaks)
    for name, values in times.items():
        print(f"{name}: {statistics.median(values):.2f} ms ({min(values):.2f} to {max(values):.2f})")


def run(words: argparse.Namespace, record: Record) -> None:
    device = record.device
    kernels.load(device)
    bench = Bench(words, device)
    names = ("model", "batch", "block", "amp")
    record.start(**{key: getattr(words, key) for key in names}, compiled=words.compile)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=words.amp), attention_backends(device):
        measure(bench, words, record)
