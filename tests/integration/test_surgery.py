"""Surgery on a teacher that has learned something: activations against weights alone, at every budget."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.distill import block_errors
from caramba.model import Model, build_model
from caramba.surgery import Calibration, CalibrationText, calibrate, fit_widths, pair_attention, transplant
from tests.unit.surgery.models import VOCAB, latent_spec, per_head_spec, spec

LENGTH = 48


def text(n: int, seed: int) -> Tensor:
    """Sequences of a random successor table, their second half a repetition: local statistics and recall."""
    table = torch.randint(VOCAB, (VOCAB, 3), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(VOCAB, (n,), generator=generator)]
    for _ in range(LENGTH // 2 - 1):
        rows.append(table[rows[-1], torch.randint(3, (n,), generator=generator)])
    half = torch.stack(rows, 1)
    return torch.cat((half, half), 1)


def loss(model: Model, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.fixture(scope="module")
def teacher() -> Model:
    torch.manual_seed(0)
    model = build_model(spec(), seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = float(loss(model, text(64, 1)).detach())
    for step in range(250):
        optimizer.zero_grad()
        loss(model, text(32, 100 + step)).backward()
        optimizer.step()
    assert float(loss(model, text(64, 1)).detach()) < 0.6 * first
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def calibration(teacher: Model) -> Calibration:
    return calibrate(teacher, CalibrationText(text(128, 2), text(32, 3)))


@torch.no_grad()
def gap(teacher: Model, student_spec: ModelSpec, method: str, calibration: Calibration) -> float:
    """Return how much more the untrained student loses than its teacher, on held-out text."""
    student = build_model(student_spec, seed=9).eval()
    transplant(teacher, student, SurgeryConfig.model_validate({"method": method}), calibration)
    return float(loss(student, text(128, 4)) - loss(teacher, text(128, 4)))


@torch.no_grad()
def block_error(teacher: Model, student_spec: ModelSpec, method: str, calibration: Calibration) -> float:
    """Return the mean relative L1 error of the untrained blocks on held-out text."""
    student = build_model(student_spec, seed=9).eval()
    transplant(teacher, student, SurgeryConfig.model_validate({"method": method}), calibration)
    return sum(block_errors(teacher, pair_attention(teacher, student), text(64, 4))) / 2


def test_dba_beats_weight_svd_at_every_tested_budget(teacher: Model, calibration: Calibration) -> None:
    kept = []
    for widths in (latent_spec(6, 4), latent_spec(10, 6), latent_spec(14, 8)):
        dba, svd, random = (gap(teacher, widths, method, calibration) for method in ("dba", "weight_svd", "random"))
        assert dba < 0.6 * min(svd, random)
        kept.append(dba)
    assert all(after < before for before, after in itertools.pairwise(kept))
    for widths in (per_head_spec(2, 8, 6), per_head_spec(4, 8, 8)):
        dba, svd = (block_error(teacher, widths, method, calibration) for method in ("dba", "weight_svd"))
        assert dba < svd


def test_chosen_widths_are_no_worse_than_equal_ones(teacher: Model, calibration: Calibration) -> None:
    equal = latent_spec(10, 6)
    fitted = fit_widths(teacher, equal, calibration, 2 * 2 * 16)
    assert gap(teacher, fitted, "dba", calibration) <= 1.05 * gap(teacher, equal, "dba", calibration)
