"""Losses over the vocabulary in chunks: exact against the dense form, masked, bounded in memory, from top-k logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.config.model import ModelSpec
from caramba.distill import (
    LanguageModelObjective,
    TeacherLogitsObjective,
    TeacherRows,
    cross_entropy,
    teacher_kl,
    vocabulary_losses,
)
from caramba.model import Model, build_model
from tests.unit.surgery.test_weight_svd import loud, spec

V, T = 40, 11


def pair(tied: bool = True) -> tuple[Model, Model]:
    described = spec().model_dump(mode="json")
    described["head"] = {"tied": tied, "bias": not tied}
    teacher, student = (loud(build_model(ModelSpec.model_validate(described), seed=seed)).double() for seed in (1, 2))
    return teacher.eval().requires_grad_(False), student


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(V, (3, T + 1), generator=torch.Generator().manual_seed(0))
    x, y = tokens[:, :-1], tokens[:, 1:].clone()
    y[0, -4:] = -100
    return x, y


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("weight", "temperature"), [(1.0, 1.0), (0.3, 2.0), (0.0, 1.0)])
def test_chunks_equal_the_dense_form(tied: bool, weight: float, temperature: float) -> None:
    teacher, student = pair(tied)
    x, y = batch()
    counts = y.flatten() != -100
    logits = student(x).flatten(0, 1)
    log_p = F.log_softmax(teacher(x).flatten(0, 1) / temperature, dim=-1)
    log_q = F.log_softmax(logits / temperature, dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[counts].mean() * temperature**2
    ce = F.cross_entropy(logits[counts], y.flatten()[counts])
    dense = weight * kl + (1 - weight) * ce
    (3.0 * dense).backward()
    expected = {name: value.grad.clone() for name, value in student.named_parameters()}
    student.zero_grad()
    losses = vocabulary_losses(
        student,
        student.hidden(x),
        y,
        rows=(lambda a, b: TeacherRows(log_p[a:b])) if weight else None,
        kl_weight=weight,
        temperature=temperature,
        chunk=4,
    )
    (3.0 * losses.loss).backward()
    torch.testing.assert_close(losses.loss.detach(), dense.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(losses.ce, ce.detach(), rtol=1e-12, atol=1e-12)
    for name, value in student.named_parameters():
        torch.testing.assert_close(value.grad, expected[name], rtol=1e-10, atol=1e-12, msg=name)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_logits_of_the_whole_batch_never_exist() -> None:
    described = spec().model_dump(mode="json")
    described["embedder"]["vocab_size"] = 4000
    teacher, student = (build_model(ModelSpec.model_validate(described), seed=seed) for seed in (1, 2))
    x = torch.randint(4000, (4, 64), generator=torch.Generator().manual_seed(0))
    objective = TeacherLogitsObjective(student, teacher.requires_grad_(False), kl_weight=0.5, chunk=16)
    with Largest() as seen:
        objective.step((x, x), lambda loss: loss.backward())
    assert seen.elements == 4000 * 32, "the embedding's own gradient is the largest; 16 x 4000 logits are smaller"


def test_kl_and_cross_entropy_are_the_textbook_sums() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 3, 5, generator=generator), torch.randn(2, 3, 5, generator=generator)
    p, q = theirs.double().softmax(-1), ours.double().softmax(-1)
    expected = (p * (p.log() - q.log())).sum(-1).mean()
    torch.testing.assert_close(teacher_kl(ours, theirs).double(), expected, atol=1e-6, rtol=1e-5)
    assert teacher_kl(theirs, theirs).abs() < 1e-6
    targets = torch.tensor([[1, -100, 2], [-100, 0, 4]])
    kept = q.log()[targets >= 0].gather(-1, targets[targets >= 0][:, None])
    torch.testing.assert_close(cross_entropy(ours, targets).double(), -kept.mean(), atol=1e-6, rtol=1e-5)
    assert cross_entropy(ours, torch.full((2, 3), -100)) == 0.0


def test_stored_entries_of_the_whole_vocabulary_give_the_live_loss() -> None:
    teacher, student = pair()
    x, y = batch()
    log_p = F.log_softmax(teacher(x).flatten(0, 1), dim=-1)
    top = log_p.topk(V, dim=-1)

    def kl(rows: TeacherRows) -> tuple[float, torch.Tensor]:
        def part(a: int, b: int) -> TeacherRows:
            return TeacherRows(*(None if t is None else t[a:b] for t in (rows.log_p, rows.index, rows.weight)))

        student.zero_grad()
        losses = vocabulary_losses(student, student.hidden(x), y, rows=part, kl_weight=1.0, chunk=5)
        losses.loss.backward()
        return losses.loss.item(), student.embedder.token.weight.grad.clone()

    live, stored = kl(TeacherRows(log_p)), kl(TeacherRows(top.values, top.indices, top.values.exp()))
    assert stored[0] == pytest.approx(live[0], rel=1e-12)
    assert live[0] > 0
    torch.testing.assert_close(stored[1], live[1], rtol=1e-8, atol=1e-10)


def test_the_teacher_stays_as_it_is_and_evaluation_agrees_with_the_step() -> None:
    teacher, student = pair()
    before = {key: value.clone() for key, value in teacher.state_dict().items()}
    objective = TeacherLogitsObjective(student, teacher, kl_weight=0.5)
    losses = objective.step(batch(), lambda loss: loss.backward())
    torch.testing.assert_close(losses, objective.evaluate(batch()))
    assert losses["loss"] == pytest.approx(float(0.5 * losses["kl"] + 0.5 * losses["ce"]))
    assert all(torch.equal(value, before[key]) for key, value in teacher.state_dict().items())
    assert all(parameter.grad is not None for parameter in student.parameters())
    plain = LanguageModelObjective(student)
    torch.testing.assert_close(plain.evaluate(batch())["loss"], losses["ce"])


def test_under_autocast_products_are_16_bit_and_gradients_32_bit() -> None:
    teacher, student = (build_model(spec(), seed=seed) for seed in (1, 2))
    x, y = batch()
    objective = TeacherLogitsObjective(student, teacher.to(torch.bfloat16).requires_grad_(False), chunk=8)
    exact = objective.evaluate((x, y))["loss"]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = objective.step((x, y), lambda loss: loss.backward())
    assert losses["loss"].dtype == torch.float32
    assert losses["loss"] == pytest.approx(float(exact), rel=0.05, abs=1e-3)
    assert {value.grad.dtype for value in student.parameters()} == {torch.float32}


def test_an_objective_with_all_logits_at_once_takes_the_same_step() -> None:
    grads = []
    for dense in (False, True):
        _, model = pair()
        found = LanguageModelObjective(model, chunk=4, dense=dense).step(batch(), lambda loss: loss.backward())
        grads.append([found["loss"], *(value.grad for value in model.parameters())])
    for chunked, whole in zip(*grads, strict=True):
        torch.testing.assert_close(whole, chunked, rtol=1e-10, atol=1e-12)
