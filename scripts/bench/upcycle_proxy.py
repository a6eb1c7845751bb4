"""The proxy study: a GQA teacher trained from scratch on local source code, and DBA students of it. Writes JSON.

    python scripts/bench/upcycle_proxy.py teacher --state DIR --seconds 560  # again until it says that it is done
    python scripts/bench/upcycle_proxy.py surgery --state DIR  # untrained students, every method and budget
    python scripts/bench/upcycle_proxy.py distil --state DIR --seconds 560  # again until every run is done
    python scripts/bench/upcycle_proxy.py collect --state DIR --out docs/benchmarks/upcycle_proxy.json

Every stage adds whole files to DIR, so that a call that is cut short loses one run at most. `--size tiny` tries the
same on a CPU. All results are of a proxy: they support no claim about Llama.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from proxy_measure import recall_by_depth, window_nll
from proxy_study import (
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
from torch import nn
from torch.nn import functional as F

from caramba.distill import BlockwiseObjective, Objective, TeacherLogitsObjective
from caramba.layer import RMSNormLayer, SwiGLULayer
from caramba.model import Model, build_model
from caramba.runs.files import write_json
from caramba.upcycle import pair_attention

BLOCK_LR, GLOBAL_LR = 1e-3, 3e-4


def train_teacher(study: Study, clock: Clock) -> bool:
    """Train the teacher until it is done or the time is up; return whether it is done."""
    size = study.size
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

    compiled = study.compiled(loss_of)
    began, first, shown = time.monotonic(), step, time.monotonic()
    while step < steps and clock.left() > 12:
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, size.teacher_lr, min(300, steps // 10))
        x, y = study.batch(size.teacher_batch, 1, step)
        with study.autocast():
            loss = compiled(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 50 == 0:
            loss.item()  # keeps the queue short, so that the clock is the device's
        if time.monotonic() - shown > 30:
            shown = time.monotonic()
            print(f"teacher step {step}/{steps} loss {loss.item():.3f} "
                  f"{(step - first) * per_step / (shown - began) / 1e3:.0f}k tok/s", flush=True)  # fmt: skip
    spent += time.monotonic() - began
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "seconds": spent},
        place,
    )
    if step < steps:
        print(f"teacher: {step} of {steps} steps; call again", flush=True)
        return False
    model.eval()
    nll = window_nll(model, study.held_out, study.autocast, 16)
    depths = recall_by_depth(model, study.held_out, study.autocast, 16)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "tokens": steps * per_step,
        "epochs": steps * per_step / study.corpus.train.numel(),
        "seconds": spent,
        "nll": float(nll.mean()),
        "perplexity": math.exp(nll.mean()),
        "bits_per_byte": float(nll.mean()) * study.corpus.bits_per_nat_token,
        "recall_by_depth": depths,
        "recall": sum(depths) / len(depths),
        "cache_elements": 2 * size.n_kv_heads * HEAD_DIM,
    }
    np.save(study.state / "teacher_nll.npy", nll)
    study.write("teacher", facts)
    print(
        "teacher:",
        {key: round(value, 4) if isinstance(value, float) else value for key, value in facts.items()},
    )
    return True


@dataclass(frozen=True)
class Run:
    """One distillation: where it starts and how long it is."""

    budget: str
    method: str = "dba"
    seed: int = 0
    share: float = 1.0

    @property
    def name(self) -> str:
        short = "" if self.share == 1.0 else "_short"
        return f"distil_{self.budget}_{self.method}_{self.seed}{short}"


RUNS = (
    Run("5.33x"),
    Run("5.33x", share=SHORT_SHARE),
    Run("6.4x"),
    Run("10.7x"),
    Run("5.33x", method="weight_svd"),
    Run("5.33x", seed=1),
    Run("5.33x", seed=2),
    Run(POOLED, method=POOLED),
)


@contextmanager
def compiled(study: Study, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run compiled code for a while. Only `forward` is replaced: hooks stay outside, and equal modules share graphs."""
    if study.device.type != "cuda":
        yield
        return
    torch._dynamo.config.recompile_limit = 64
    for module in modules:
        module.forward = torch.compile(module.forward)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def train(
    study: Study, objective: Objective, *, tokens: int, lr: float, seed: int, first: int
) -> dict[str, float]:
    """Run one phase on `tokens` tokens, from batch `first` of the seed's stream, with a cosine of its own."""
    size = study.size
    steps = max(tokens // (size.batch * size.n_tokens), 1)
    named = objective.trainable()
    chosen = {id(parameter) for _, parameter in named}
    for parameter in objective.model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    objective.model.train()
    parameters = [parameter for _, parameter in named]
    optimizer = torch.optim.AdamW(
        parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=study.device.type == "cuda"
    )
    began = time.monotonic()
    steady, steady_step = began, 0
    losses: dict[str, torch.Tensor] = {}
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps, lr, max(steps // 30, 1))
        with study.autocast():
            losses = objective.step(
                study.batch(size.batch, 100 + seed, first + step), lambda loss: loss.backward()
            )
        for group in objective.clip_groups():
            nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 4:
            losses["loss"].item()
        if step == 4:
            steady, steady_step = time.monotonic(), 5
    loss = losses["loss"].item()
    ended = time.monotonic()
    objective.finish()
    objective.model.eval().requires_grad_(False)
    per_second = (steps - steady_step) * size.batch * size.n_tokens / max(ended - steady, 1e-9)
    return {
        "steps": steps,
        "tokens": steps * size.batch * size.n_tokens,
        "seconds": ended - began,
        "tokens_per_second": per_second,
        "loss": loss,
    }


def seconds_of(study: Study, run: Run) -> float:
    """Return how long a run may take, from the slowest of those that are done."""
    done = [found["seconds"] / found["share"] for other in RUNS if (found := study.read(other.name))]
    return max(done, default=150.0) * run.share * 1.1 + 15


def distil(study: Study, clock: Clock) -> bool:
    """Do the distillations that are not done yet, while there is time; return whether all are."""
    teacher = study.frozen_teacher
    size = study.size
    rest = [m for m in teacher.modules() if isinstance(m, RMSNormLayer | SwiGLULayer)]
    students: dict[tuple[str, bool], Model] = {}
    for run in RUNS:
        if run.budget not in (*size.budgets, POOLED):
            continue
        if study.read(run.name):
            continue
        needed = seconds_of(study, run)
        if clock.left() < needed:
            print(
                f"distil: {clock.left():.0f} s left, {run.name} takes about {needed:.0f}; call again",
                flush=True,
            )
            return False
        began = time.monotonic()
        key = run.budget, run.method == "fitted"
        if key not in students:
            students[key] = study.student(run.budget, run.method)
        student = students[key]
        surgery = transplant_into(study, student, run.method, run.seed)
        untrained = measure(study, teacher, student)
        pairs = pair_attention(teacher, student)
        spans, first = {}, 0
        for name, tokens, lr in (
            ("blockwise", size.blockwise_tokens, BLOCK_LR),
            ("drift", size.drift_tokens, BLOCK_LR / 4),
            ("global", size.global_tokens, GLOBAL_LR),
        ):
            objective = (
                TeacherLogitsObjective(student, teacher, chunk=8192)
                if name == "global"
                else BlockwiseObjective(student, teacher, pairs, on_student=name == "drift")
            )
            modules = objective.compilable() + (rest if name != "global" else [])
            with compiled(study, modules):
                spans[name] = train(
                    study, objective, tokens=int(tokens * run.share), lr=lr, seed=run.seed, first=first
                )
            first += int(spans[name]["steps"])
            spans[name]["after"] = measure(study, teacher, student)
            print(
                f"{run.name} {name}: ratio {spans[name]['after']['ppl_ratio']:.4f} kl {spans[name]['after']['kl']:.4f} "
                f"recall {spans[name]['after']['recall_share']:.3f} of the teacher's, "
                f"{spans[name]['tokens_per_second'] / 1e3:.0f}k tok/s, {spans[name]['seconds']:.0f} s",
                flush=True,
            )
        study.write(
            run.name,
            {
                **asdict(run),
                "surgery": surgery,
                "untrained": untrained,
                "phases": spans,
                "tokens": sum(span["tokens"] for span in spans.values()),
                "seconds": time.monotonic() - began,
            },
        )
    return True


def untrained_students(study: Study) -> None:
    """Make and measure a student of every budget by every method, without training."""
    if study.read("surgery"):
        return
    rows = []
    cases = [(budget, method) for budget in study.size.budgets for method in METHODS]
    for budget, method in [*cases, (POOLED, POOLED)]:
        student = study.student(budget, method)
        surgery = transplant_into(study, student, method, 0)
        row = {"budget": budget, **surgery, **measure(study, study.frozen_teacher, student)}
        rows.append(row)
        print(
            f"{budget} {method}: {row['kv_ratio']:.2f}x, untrained ratio {row['ppl_ratio']:.4f} "
            f"[{row['ppl_ratio_low']:.4f}, {row['ppl_ratio_high']:.4f}], {surgery['seconds']:.1f} s",
            flush=True,
        )
    study.write("surgery", {"rows": rows})


def collect(study: Study, out: Path) -> None:
    """Join the stages' files to the study's JSON."""
    size = study.size
    rows = study.read("surgery")
    distilled = [found for run in RUNS if (found := study.read(run.name))]
    facts = {
        "platform": platform.platform(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if study.device.type == "cuda" else "cpu",
    }
    write_json(
        out,
        {
            "benchmark": "upcycle_proxy",
            "made_by": "python scripts/bench/upcycle_proxy.py teacher|surgery|distil|collect",
            "label": "proxy: a teacher trained from scratch on local source code; no claim about Llama",
            "machine": facts,
            "size": {key: value for key, value in asdict(size).items() if key != "budgets"},
            "budgets": size.budgets,
            "corpus": {
                "files": study.corpus.n_files,
                "train_tokens": study.corpus.train.numel(),
                "val_tokens": study.corpus.val.numel(),
                "val_bytes": study.corpus.val_bytes,
                "vocab_size": study.corpus.vocab_size,
            },
            "teacher": study.read("teacher"),
            "untrained": rows["rows"] if rows else [],
            "distilled": distilled,
        },
    )
    print(f"wrote {out}: {len(distilled)} of {len(RUNS)} distillations")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("teacher", "surgery", "distil", "collect"))
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/upcycle_proxy.json"))
    options = parser.parse_args()
    clock = Clock(options.seconds)
    study = Study(options.state, options.size)
    with study.attention():
        if options.stage == "teacher":
            return 0 if train_teacher(study, clock) else 3
        if options.stage == "surgery":
            untrained_students(study)
            return 0
        if options.stage == "distil":
            return 0 if distil(study, clock) else 3
    collect(study, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
