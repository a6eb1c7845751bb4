"""The proxy study: a GQA teacher trained from scratch on local source code, and DBA students of it. Writes JSON.

    torchrun --nproc-per-node 4 scripts/bench/run.py upcycle_proxy teacher --state DIR --seconds 560
    python scripts/bench/run.py upcycle_proxy surgery search --state DIR --devices 4 --seconds 300
    python scripts/bench/run.py upcycle_proxy distil --state DIR --devices 4 --seconds 560
    python scripts/bench/run.py upcycle_proxy collect --state DIR --out docs/benchmarks/upcycle_proxy.json

`surgery` makes the untrained students, `search` chooses the recipe on other validation windows than those that are
reported. Every stage adds whole files to DIR and does what is missing there, so that a call that is cut short loses
the running jobs at most; on one device run the teacher by `python`. `--size tiny` tries the same on a CPU. All
results are of a proxy: they support no claim about Llama.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from cases.proxy_measure import recall_by_depth
from cases.proxy_pool import Pool, pool
from cases.proxy_recipe import Recipe, Run, distil
from cases.proxy_study import (
    CONTINUED,
    EVAL_BATCH,
    HEAD_DIM,
    METHODS,
    POOLED,
    SHORT_SHARE,
    SIZES,
    Clock,
    Study,
    measure,
    rate,
    teacher_spec,
    transplant_into,
)
from record import Record
from torch import distributed, nn
from torch.nn import functional as F

from caramba.metrics import windowed_nll
from caramba.model import build_model
from caramba.runs.files import write_json

HEADLINE = "5.33x"
# Widths that students are distilled with: as many elements as the budget's own, fewer of them geometric.
WIDTHS = {"5.33x": (60, 12), "6.4x": (50, 10), "10.7x": (30, 6)}
# What a budget's recipe has otherwise than the one before it, before any trial.
OWN: dict[str, dict[str, Any]] = {"10.7x": {"global_lr": 1e-3, "map_lr": 1.0}}
# Single changes of the recipe, tried in this order on top of the best so far, the first ones in parallel.
CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    HEADLINE: ({}, {"kl_weight": 0.85}),
    "10.7x": ({}, {"global_lr": 1.5e-3}),
}
TRIAL_SHARE = 0.2  # of distil_tokens


def train_teacher(study: Study, clock: Clock) -> bool:
    """Train the teacher until it is done or the time is up; return whether it is done. Ranks share each batch."""
    size = study.size
    rank, world = (
        (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    )
    if study.read("teacher"):
        return True
    model = build_model(teacher_spec(size, study.corpus.vocab_size), seed=0).to(study.device)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=size.teacher_lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=study.device.type == "cuda",
    )
    place, step, spent = study.state / "teacher.pt", 0, 0.0
    if place.is_file():
        saved = torch.load(place, map_location=study.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, spent = saved["step"], saved["seconds"]
    per_step = size.teacher_batch * size.n_tokens
    steps = math.ceil(size.teacher_tokens / per_step)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())

    compiled = study.compile_module(loss_of)
    began, first, shown = time.monotonic(), step, time.monotonic()
    while step < steps and (world > 1 or clock.left() > 12):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, size.teacher_lr, min(300, steps // 10))
        x, y = (part.chunk(world)[rank] for part in study.batch(size.teacher_batch, 1, step, fresh=False))
        with study.autocast():
            loss = compiled(x, y)
        loss.backward()
        if world > 1:
            average_gradients(model, world)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            loss.item()  # keeps the queue short, so that the clock is the device's
        if time.monotonic() - shown > 30 and rank == 0:
            shown = time.monotonic()
            print(f"teacher step {step}/{steps} loss {loss.item():.3f} "
                  f"{(step - first) * per_step / (shown - began) / 1e3:.0f}k tok/s", flush=True)  # fmt: skip
    spent += time.monotonic() - began
    if rank:
        return step == steps
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": spent},
        place,
    )
    if step < steps:
        print(f"teacher: {step} of {steps} steps; call again", flush=True)
        return False
    model.eval()
    text = study.held_out.text
    with study.autocast():
        nll = windowed_nll(model, text, windows=len(text), batch_size=EVAL_BATCH, device=study.device)
    depths = recall_by_depth(model, study.held_out, study.autocast, EVAL_BATCH)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "tokens": steps * per_step,
        "epochs": steps * per_step / study.corpus.train.numel(),
        "seconds": spent,
        "devices": world,
        "nll": nll.mean,
        "perplexity": nll.perplexity,
        "bits_per_byte": nll.mean * study.corpus.bits_per_nat_token,
        "recall_by_depth": depths,
        "recall": sum(depths) / len(depths),
        "cache_elements": 2 * size.n_kv_heads * HEAD_DIM,
    }
    study.write("teacher", facts)
    print(
        "teacher:",
        {key: round(value, 4) if isinstance(value, float) else value for key, value in facts.items()},
    )
    return True


def average_gradients(model: nn.Module, world: int) -> None:
    """Replace every gradient by its mean over the ranks, in one reduction."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= world
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def measure_untrained(study: Study, budget: str, method: str) -> dict[str, Any]:
    """Make and measure a student of a budget by a method, without training."""
    student = study.student(budget, method)
    surgery = transplant_into(study, student, method, 0)
    row = {"budget": budget, **surgery, **measure(study, study.frozen_teacher, student)}
    print(
        f"{budget} {method}: {row['kv_ratio']:.2f}x, untrained ratio {row['ppl_ratio']:.4f} "
        f"[{row['ppl_ratio_low']:.4f}, {row['ppl_ratio_high']:.4f}], recall {row['recall_share']:.3f}",
        flush=True,
    )
    return row


def work(study: Study, what: str, *arguments: Any) -> Any:
    """Do one job of the pool; module-level, for processes of their own."""
    if what == "calibrate":
        return len(study.calibration.layers)
    if what == "untrained":
        return measure_untrained(study, *arguments)
    (run,) = arguments
    if what == "trial":
        name = f"trial_{hashlib.sha256(repr(run).encode()).hexdigest()[:12]}"
        if not (found := study.read(name)):
            study.write(name, found := distil(study, run, selection=True))
        return found
    study.write(run.name, distil(study, run))
    return True


def surgery_rows(study: Study, jobs: Pool, clock: Clock) -> None:
    """Make and measure the untrained students of every budget by every method."""
    if study.read("surgery"):
        return
    jobs.map([("calibrate",)], clock, [0.0])
    cases = [(budget, method) for budget in study.size.budgets for method in METHODS]
    cases += [(POOLED, POOLED)]
    rows = jobs.map([("untrained", *case) for case in cases], clock, [0.0] * len(cases))
    study.write("surgery", {"rows": [row for row in rows if row]})


def search(study: Study, jobs: Pool, clock: Clock) -> None:
    """Change one thing at a time on short runs, budget by budget: what helps most stays."""
    tokens = int(study.size.distil_tokens * TRIAL_SHARE)
    chosen: dict[str, Any] = {}
    trials: list[dict[str, Any]] = []
    best = Run(HEADLINE, tokens=tokens)
    each = 0.0
    for budget, changes in CHANGES.items():
        if budget not in study.size.budgets:
            continue
        elements = sum(study.size.budgets[budget])
        waiting = [change for change in changes if sum(change.get("widths", (elements,))) == elements]
        best, lowest = beginning(study, best, budget), math.inf
        n_devices = len(jobs.queues)
        while waiting and clock.left() > each:
            tried, waiting = waiting[:n_devices], waiting[n_devices:]
            began = time.monotonic()
            runs = [best.with_changes(**change) for change in tried]
            found = jobs.map([("trial", run) for run in runs], clock, [each] * len(runs))
            each = max(each, (time.monotonic() - began) * 1.05)
            better = []
            for change, run, result in zip(tried, runs, found, strict=True):
                if result is None:
                    continue
                ratio = result["phases"]["global"]["after"]["ppl_ratio"]
                trials.append({"change": change, **result})
                if ratio < lowest:
                    better.append((ratio, change, run))
            if better:
                better.sort(key=lambda item: item[0])
                lowest, _, best = better[0]
            print(
                f"best: {lowest:.4f} {best.budget} {best.widths} {asdict(best.recipe)}; {clock.left():.0f} s left",
                flush=True,
            )
        if lowest < math.inf:
            chosen[budget] = asdict(best)
    study.write("search", {"best": chosen, "trials": trials})


def beginning(study: Study, before: Run, budget: str) -> Run:
    """Return what a budget begins with, after what was found for the one before it."""
    widths = WIDTHS.get(budget) if study.size_name == "full" else None
    return replace(before, budget=budget, widths=widths).with_changes(**OWN.get(budget, {}))


def plan_runs(study: Study) -> list[Run]:
    """Return the distillations of the study, by the recipe that the search chose."""
    found = study.read("search")
    chosen = found["best"] if found else {}
    full = study.size.distil_tokens

    def of(budget: str, before: Run) -> Run:
        if not (kept := chosen.get(budget)):
            return replace(beginning(study, before, budget), tokens=full)
        widths = tuple(kept["widths"]) if kept["widths"] else None
        return replace(Run(**kept), tokens=full, recipe=Recipe(**kept["recipe"]), widths=widths)

    base = of(HEADLINE, Run(HEADLINE))
    short = replace(base, tokens=int(full * SHORT_SHARE))
    recipe = base.recipe
    runs = [
        base,
        of("10.7x", base),
        of("6.4x", base),
        replace(base, seed=1),
        replace(base, seed=2),
        short,
        # What the method and the layout are worth, and the text alone, on as many tokens as the run before.
        replace(short, method="weight_svd"),
        Run(POOLED, POOLED, tokens=short.tokens, recipe=recipe),
        Run(
            CONTINUED,
            CONTINUED,
            tokens=short.tokens,
            recipe=replace(recipe, blockwise=0.0, drift=0.0, kl_weight=0.0, hidden_weight=0.0),
        ),
    ]
    known = (*study.size.budgets, POOLED, CONTINUED)
    return [run for run in runs if run.budget in known and not study.read(run.name)]


def distillations(study: Study, jobs: Pool, clock: Clock, seconds_each: float) -> None:
    """Do the distillations that are not done yet, while there is time."""
    runs = plan_runs(study)
    seconds = [seconds_each * (0.15 + 0.85 * run.tokens / study.size.distil_tokens) for run in runs]
    jobs.map([("distil", run) for run in runs], clock, seconds)


def collect(study: Study, out: Path) -> None:
    """Join the stages' files to the study's JSON."""
    size = study.size
    rows = study.read("surgery")
    places = sorted(study.state.glob("distil_*.json"))
    distilled = [found for place in places if (found := study.read(place.stem))]
    found = study.read("search")
    facts = {
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if study.device.type == "cuda" else "cpu",
    }
    write_json(
        out,
        {
            "benchmark": "upcycle_proxy",
            "made_by": "python scripts/bench/run.py upcycle_proxy teacher|surgery|search|distil|collect",
            "label": "proxy: a teacher trained from scratch on local source code; no claim about Llama",
            "intervals": "normal",
            "machine": facts,
            "size": {key: value for key, value in asdict(size).items() if key != "budgets"},
            "budgets": size.budgets,
            "corpus": {
                "files": study.corpus.n_files,
                "train_tokens": study.corpus.train.numel(),
                "fresh_tokens": study.corpus.fresh.numel(),
                "val_tokens": study.corpus.val.numel(),
                "val_bytes": study.corpus.val_bytes,
                "vocab_size": study.corpus.vocab_size,
            },
            "teacher": study.read("teacher"),
            "untrained": rows["rows"] if rows else [],
            "search": found,
            "distilled": distilled,
        },
    )
    print(f"wrote {out}: {len(distilled)} distillations, {len(plan_runs(study))} to go")


STAGES = ("teacher", "surgery", "search", "distil", "collect")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", nargs="+", choices=STAGES)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--each", type=float, default=0.0, help="seconds that one distillation takes")


def run(options: argparse.Namespace, record: Record) -> int | None:
    clock = Clock(options.seconds)
    if "teacher" in options.stage and "RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl")
        if distributed.get_rank() == 0:
            Study(options.state, options.size)  # makes the corpus for all
        distributed.barrier()
    study = Study(options.state, options.size)
    if "teacher" in options.stage:
        with study.attention():
            done = train_teacher(study, clock)
        if distributed.is_initialized():
            distributed.destroy_process_group()
        return 0 if done else 3
    if "collect" in options.stage:
        collect(study, options.out)
        return 0
    with pool(options.devices, options.state, options.size, work) as jobs:
        if "surgery" in options.stage:
            surgery_rows(study, jobs, clock)
        if "search" in options.stage:
            search(study, jobs, clock)
        if "distil" in options.stage:
            distillations(study, jobs, clock, options.each)
    return 0
