"""`distillation_rows` and the fused loss of two heads against float64 softmax and autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from caramba.distill.vocabulary import LiveTeacher, distill_heads, vocabulary_losses
from caramba.errors import ConfigError
from caramba.ops.distillation_rows import distillation_rows
from tests.integration.export.samples import GQA, loud, transformer

TARGETS = torch.tensor([3, -100, 0, 10])


def expected(z: torch.Tensor, y: torch.Tensor, temperature: float, weight: float) -> tuple[torch.Tensor, ...]:
    """Return kl, ce and the gradient of their weighted sum, by autograd in float64."""
    z = z.double().requires_grad_()
    log_p = (y.double() / temperature).log_softmax(-1)
    kl = (log_p.exp() * (log_p - (z / temperature).log_softmax(-1))).sum(-1) * temperature**2
    ce = F.cross_entropy(z, TARGETS, reduction="none", ignore_index=-100)
    counts = TARGETS != -100
    (grad,) = torch.autograd.grad(((weight * kl + (1 - weight) * ce) * counts).sum(), z)
    return (kl * counts).detach(), ce.detach(), grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("temperature", "weight"), [(1.0, 1.0), (2.0, 1.0), (1.0, 0.7), (3.0, 0.4)])
def test_distillation_rows_equals_autograd(dtype: torch.dtype, temperature: float, weight: float) -> None:
    random = torch.Generator().manual_seed(5)
    z, y = (torch.randn(4, 11, generator=random, dtype=torch.float64).mul(3).to(dtype) for _ in range(2))
    kl, ce = (torch.full((4,), float("nan"), dtype=dtype) for _ in range(2))
    wanted = expected(z, y, temperature, weight)
    logits = z.clone()
    distillation_rows(logits, y, TARGETS, kl, ce, temperature=temperature, kl_weight=weight)
    for found, value in zip((kl, ce, logits), wanted, strict=True):
        torch.testing.assert_close(found.double(), value, rtol=1e-5, atol=1e-5)
    untouched = z.clone()
    distillation_rows(untouched, y, TARGETS, kl, ce, temperature=temperature, kl_weight=weight, writes=False)
    assert torch.equal(untouched, z)


def test_distillation_rows_refuses_other_shapes() -> None:
    z, losses = torch.zeros(4, 11), torch.zeros(4)
    with pytest.raises(ConfigError, match="expected \\[R, V\\] twice"):
        distillation_rows(z, z[:, :5], TARGETS, losses, losses.clone())
    with pytest.raises(ConfigError, match="one floating dtype"):
        distillation_rows(z, z.double(), TARGETS, losses, losses.clone())


@pytest.mark.parametrize("weight", [1.0, 0.7])
def test_distill_heads_equals_chunked_losses(weight: float) -> None:
    student, teacher = loud(transformer(GQA), seed=1), loud(transformer(GQA), seed=2)
    tokens = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(3))
    targets = tokens.roll(-1, 1).clone()
    targets[0, 4] = -100
    with torch.no_grad():
        rows = LiveTeacher(teacher, teacher.hidden(tokens).flatten(0, 1), 1.5)
    gradients = []
    for is_fused in (True, False):
        student.zero_grad()
        hidden = student.hidden(tokens)
        losses = (
            distill_heads(
                hidden.flatten(0, 1),
                student.head_weight,
                rows,
                targets.flatten(),
                kl_weight=weight,
                temperature=1.5,
                chunk=4,
            )
            if is_fused
            else vocabulary_losses(student, hidden, targets, rows=rows, kl_weight=weight, temperature=1.5)
        )
        losses.loss.backward()
        gradients.append((losses, [parameter.grad.clone() for parameter in student.parameters()]))
    (fused, ours), (chunked, theirs) = gradients
    for name in ("loss", "ce", "kl"):
        torch.testing.assert_close(getattr(fused, name), getattr(chunked, name), rtol=1e-5, atol=1e-6)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
