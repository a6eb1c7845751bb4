"""How the proxy study distils: the recipe of a run, its three phases, and what is measured after each."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from cases.proxy_study import CONTINUED, Study, measure, rate, transplant_into
from torch import Tensor, nn

from caramba.distill import BlockwiseObjective, Objective, TeacherLogitsObjective
from caramba.layer import RMSNormLayer, SwiGLULayer
from caramba.model import Model
from caramba.optim import clip_gradients
from caramba.surgery import pair_attention

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Recipe:
    """What a distillation spends its tokens on, and at which rates; token counts are shares of the run's tokens.

    Attributes:
        blockwise: share of the tokens for teacher-forced blocks; `drift`, for blocks on the student's inputs; the
            global phase takes the rest.
        map_lr: learning rate of attention projections in the global phase, as a multiple of `global_lr`.
        kl_weight: 1 is KL to the teacher alone; the rest is cross-entropy on the text.
        attention_weight: of KL(A_t || A_s) on sampled queries, in the blockwise phases.
        corrupt: share of the input tokens in the global phase that are replaced by others of the batch.
        muon: matrices of the stack take Muon instead of AdamW in the global phase (the rest, AdamW).
        hidden_weight: of the distance to the teacher's residual stream after every block in the global phase; it
            falls to 0 over the phase, so that the end is KL alone.
    """

    blockwise: float = 0.05
    drift: float = 0.02
    batch: int = 16
    block_lr: float = 1e-3
    global_lr: float = 3e-4
    map_lr: float = 2.0
    kl_weight: float = 0.7
    attention_weight: float = 0.0
    corrupt: float = 0.0
    muon: bool = False
    hidden_weight: float = 15.0


@dataclass(frozen=True)
class Run:
    """One distillation: the student's cache (`widths` other than the budget's), its start, data seed and tokens."""

    budget: str
    method: str = "dba"
    seed: int = 0
    tokens: int = 0
    recipe: Recipe = field(default_factory=Recipe)
    widths: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"distil_{self.budget}_{self.method}_{self.seed}_{round(self.tokens / 1e6, 1)}M"

    def with_changes(self, **changes: Any) -> Run:
        """Return the run with another `method`, other `widths` or other parts of the recipe."""
        own = {name: changes.pop(name) for name in ("method", "widths") if name in changes}
        return replace(self, **own, recipe=replace(self.recipe, **changes))


@contextmanager
def compiled(study: Study, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Run compiled code for a while. Only `forward` is replaced: hooks stay outside, and equal modules share graphs."""
    if study.device.type != "cuda":
        yield
        return
    torch._dynamo.config.recompile_limit = 128
    for module in modules:
        module.forward = torch.compile(module.forward, dynamic=False)
    try:
        yield
    finally:
        for module in modules:
            module.__dict__.pop("forward", None)


def optimizers(
    study: Study, objective: Objective, lr: float, *, map_lr: float, muon: bool
) -> list[torch.optim.Optimizer]:
    """Return the optimisers of a phase; each group remembers its peak rate."""
    fused = study.device.type == "cuda"
    maps, matrices, rest = [], [], []
    for name, parameter in objective.trainable():
        if muon and parameter.ndim == 2 and not name.startswith("embedder"):
            matrices.append(parameter)
        elif ".projection." in name:
            maps.append(parameter)
        else:
            rest.append(parameter)
    groups = [
        {"params": part, "lr": peak, "peak": peak} for part, peak in ((rest, lr), (maps, lr * map_lr)) if part
    ]
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=lr, betas=BETAS, weight_decay=0.0, fused=fused)
    ]
    if matrices:
        group = {"params": matrices, "lr": lr, "peak": lr}
        made.append(torch.optim.Muon([group], lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"))
    return made


def corrupt(batch: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Replace a share of the tokens [B, T] by tokens of other places of the batch."""
    others = torch.randint(batch.numel(), batch.shape, generator=generator, device=batch.device)
    replaced = torch.rand(batch.shape, generator=generator, device=batch.device) < share
    return torch.where(replaced, batch.flatten()[others], batch)


def train(
    study: Study, objective: Objective, made: list[torch.optim.Optimizer], *, steps: int, run: Run, first: int
) -> dict[str, float]:
    """Run one phase of `steps` steps, from batch `first` of the run's stream, with a cosine of its own."""
    batch = run.recipe.batch
    chosen = {id(parameter) for _, parameter in objective.trainable()}
    for parameter in objective.model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    objective.model.train()
    noise = torch.Generator(study.device).manual_seed(run.seed)
    began = time.monotonic()
    steady, steady_step = began, 0
    losses: dict[str, Tensor] = {}
    for step in range(steps):
        for optimizer in made:
            for group in optimizer.param_groups:
                group["lr"] = rate(step, steps, group["peak"], max(steps // 30, 1))
        x, y = study.batch(batch, 100 + run.seed, first + step, fresh=True)
        if run.recipe.corrupt and isinstance(objective, TeacherLogitsObjective):
            x = corrupt(x, run.recipe.corrupt, noise)
        objective.at(step, steps)
        with study.autocast():
            losses = objective.step((x, y), lambda loss: loss.backward())
        clip_gradients(objective.clip_groups(), 1.0)
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 20 == 4:
            losses["loss"].item()  # keeps the queue short
        if step == 4:
            steady, steady_step = time.monotonic(), 5
    loss = losses["loss"].item()
    ended = time.monotonic()
    objective.finish()
    objective.model.eval().requires_grad_(False)
    width = batch * study.size.n_tokens
    return {
        "steps": steps,
        "tokens": steps * width,
        "seconds": ended - began,
        "tokens_per_second": (steps - steady_step) * width / max(ended - steady, 1e-9),
        "loss": loss,
    }


def phases(study: Study, run: Run) -> list[tuple[str, int, float]]:
    """Return (name, steps, learning rate) of the phases; together they take at most the run's tokens."""
    recipe = run.recipe
    total = run.tokens // (recipe.batch * study.size.n_tokens)
    blockwise, drift = int(total * recipe.blockwise), int(total * recipe.drift)
    return [
        ("blockwise", blockwise, recipe.block_lr),
        ("drift", drift, recipe.block_lr / 4),
        ("global", total - blockwise - drift, recipe.global_lr),
    ]


def distil(study: Study, run: Run, *, selection: bool = False) -> dict[str, Any]:
    """Do one run and return its record. `selection` measures it on the windows for selection."""
    began = time.monotonic()
    teacher, recipe = study.frozen_teacher, run.recipe
    rest = [m for m in teacher.modules() if isinstance(m, RMSNormLayer | SwiGLULayer)]
    student: Model = study.student(run.budget, run.method, run.widths)
    surgery = transplant_into(study, student, run.method, run.seed)
    untrained = measure(study, teacher, student, selection=selection)
    pairs = pair_attention(teacher, student) if run.method != CONTINUED else []
    spans: dict[str, dict[str, Any]] = {}
    first = 0
    for name, steps, lr in phases(study, run):
        if not steps:
            continue
        objective: Objective = (
            TeacherLogitsObjective(
                student,
                teacher,
                chunk=8192,
                kl_weight=recipe.kl_weight,
                hidden_weight=recipe.hidden_weight,
            )
            if name == "global"
            else BlockwiseObjective(
                student,
                teacher,
                pairs,
                on_student=name == "drift",
                attention_weight=recipe.attention_weight,
                n_queries=32,
            )
        )
        is_global = name == "global"
        made = optimizers(
            study, objective, lr, map_lr=recipe.map_lr if is_global else 1.0, muon=recipe.muon and is_global
        )
        with compiled(study, objective.compilable() + ([] if is_global else rest)):
            spans[name] = train(study, objective, made, steps=steps, run=run, first=first)
        first += steps
        if is_global or not selection:  # a trial is measured at its end alone
            spans[name]["after"] = measure(study, teacher, student, selection=selection)
    last = spans["global"]["after"]
    print(
        f"{run.name} {'trial ' if selection else ''}{asdict(recipe)}: ratio {untrained['ppl_ratio']:.4f} -> "
        f"{last['ppl_ratio']:.4f} kl {last['kl']:.4f} recall {last['recall_share']:.3f} of the teacher's, "
        f"{spans['global']['tokens_per_second'] / 1e3:.0f}k tok/s, {time.monotonic() - began:.0f} s",
        flush=True,
    )
    return {
        **asdict(run),
        "surgery": surgery,
        "untrained": untrained,
        "phases": spans,
        "tokens": sum(span["tokens"] for span in spans.values()),
        "seconds": time.monotonic() - began,
    }
