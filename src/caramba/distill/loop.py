"""Distillation in one call, on torch modules: a plain training loop over an objective.

It keeps no state on disk. `caramba.launch` trains with schedules, several ranks, resume and a report.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import islice

import torch
from torch import Tensor

from caramba.distill.blockwise import BlockwiseObjective
from caramba.distill.objective import Batch, Objective, TeacherLogitsObjective
from caramba.errors import CarambaError, ConfigError
from caramba.lower.lowering import lower
from caramba.model import Model, pair_attention

OBJECTIVES = ("blockwise", "drift", "kl")
OnStep = Callable[[int, Mapping[str, float]], None]


def distill(
    student: Model,
    teacher: Model,
    batches: Iterable[Batch | Tensor],
    *,
    objective: str | Objective = "kl",
    steps: int | None = None,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    clip: float = 1.0,
    on_step: OnStep | None = None,
) -> list[dict[str, float]]:
    """Train a student on its teacher and return the losses of each step.

    The teacher is put in eval mode without gradients; the student ends in eval mode.

    Args:
        batches: tokens [B, T + 1] int64, or pairs of inputs and targets [B, T].
        objective: `blockwise` (each attention layer on the teacher's block), `drift` (the same on the student's hidden
            states), `kl` (the teacher's distribution), or an Objective of this student.
        steps: most steps; by default one for each batch.
        clip: largest norm of the gradients of each layer (`blockwise`, `drift`) or of all weights.
        on_step: called with the step, from 1, and its losses.

    Raises:
        ConfigError: an unknown objective, or models whose attention layers do not pair.
        CarambaError: the loss is not finite; the student has the weights of the last good step.
    """
    teacher.eval().requires_grad_(False)
    goal = _objective(objective, student, teacher)
    trained = [parameter for _, parameter in goal.trainable()]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    device = student.embedder.token.weight.device
    history: list[dict[str, float]] = []
    student.train()
    lowered = lower(student, device, "train"), lower(teacher, device, "prefill")
    try:
        for number, batch in enumerate(islice(batches, steps), start=1):
            optimizer.zero_grad(set_to_none=True)
            losses = goal.step(_parts(batch, device), lambda loss: loss.backward())
            found = {key: float(value) for key, value in losses.items()}
            if not torch.isfinite(losses["loss"]):
                raise CarambaError(f"distill: the loss of step {number} is {found['loss']}; lower lr={lr}")
            for group in goal.clip_groups():
                torch.nn.utils.clip_grad_norm_(group, clip)
            optimizer.step()
            goal.advance(losses)
            history.append(found)
            if on_step is not None:
                on_step(number, found)
            if goal.is_done:
                break
    finally:
        student.eval()
        for one in lowered:
            one.restore()
    goal.finish()
    return history


def _objective(objective: str | Objective, student: Model, teacher: Model) -> Objective:
    if isinstance(objective, Objective):
        if objective.model is not student:
            raise ConfigError("distill: the objective trains another model than the student")
        return objective
    if objective in ("blockwise", "drift"):
        pairs = pair_attention(teacher, student)
        return BlockwiseObjective(student, teacher, pairs, on_student=objective == "drift")
    if objective == "kl":
        return TeacherLogitsObjective(student, teacher)
    raise ConfigError(
        f"distill: objective={objective!r}; expected {', '.join(OBJECTIVES)}, or an Objective of caramba.distill"
    )


def _parts(batch: Batch | Tensor, device: torch.device) -> Batch:
    parts = (batch[:, :-1], batch[:, 1:]) if isinstance(batch, Tensor) else batch
    return tuple(part.to(device) for part in parts)
