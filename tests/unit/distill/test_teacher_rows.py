"""Stored likeliest entries of a teacher: the loss and its gradient, against the whole distribution, in 16 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from caramba.distill import TeacherCache, TeacherLogitsObjective, TeacherRows, vocabulary_losses
from caramba.distill.teacher_rows import (
    StoredRows,
    bytes_per_token,
    n_entries,
    sparse_losses,
    sparse_rows,
)
from caramba.distill.vocabulary import distill_stored
from caramba.errors import ConfigError
from caramba.model import build_model
from tests.unit.distill.test_teacher_cache import Counted, backward, batch
from tests.unit.surgery.test_weight_svd import TOKENS, spec, student_spec


def stored(log_p: Tensor, top_k: int, samples: int, *, half: bool) -> StoredRows:
    places = torch.arange(len(log_p))
    return StoredRows(*sparse_rows(log_p, top_k, samples, places, half=half).values(), n_samples=samples)


@pytest.mark.parametrize("samples", [5, 0])
@pytest.mark.parametrize(("temperature", "kl_weight"), [(1.0, 1.0), (1.0, 0.4), (2.0, 1.0), (2.0, 0.4)])
def test_gradient_in_place_equals_that_of_the_chunked_losses(
    temperature: float, kl_weight: float, samples: int
) -> None:
    torch.manual_seed(0)
    tokens, targets = TOKENS[:2, :-1], TOKENS[:2, 1:].clone()
    targets[0, :3] = -100
    teacher, student = (
        build_model(spec(), seed=1).double(),
        build_model(student_spec(4, 8, 8), seed=2).double(),
    )
    log_p = (teacher(tokens).flatten(0, 1) * 3 / temperature).log_softmax(-1).detach()
    rows = stored(log_p, 9, samples, half=True)
    options = {"kl_weight": kl_weight, "temperature": temperature}
    found = []
    for fused in (False, True):
        hidden = student.hidden(tokens).detach().requires_grad_()
        if fused:
            losses = distill_stored(
                hidden.flatten(0, 1), student.head_weight, rows, targets.flatten(), chunk=7, **options
            )
        else:
            losses = vocabulary_losses(student, hidden, targets, rows=rows, chunk=5, **options)
        grads = torch.autograd.grad(losses.loss * 3, (hidden, student.head_weight))
        found.append((losses.loss, losses.ce, losses.kl, *grads))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_samples_keep_the_divergence_and_its_gradient_without_bias() -> None:
    torch.manual_seed(1)
    logits = torch.randn(1, 5000).double() * 3
    log_p, student = logits.log_softmax(-1), (logits + torch.randn_like(logits) * 0.3)
    rows, targets = 4000, torch.zeros(1, dtype=torch.int64)
    log_q = student.log_softmax(-1)
    whole = (log_p.exp() * (log_p - log_q)).sum()
    found = stored(log_p.expand(rows, -1), 64, 32, half=False)(0, rows)
    assert found.index is not None
    assert found.weight is not None
    assert torch.equal(found.index[0, :64], log_p.topk(64).indices[0])
    top = log_p.topk(64).values.exp().sum()
    torch.testing.assert_close(found.weight[:, 64:].sum(-1), (1 - top).expand(rows), rtol=1e-9, atol=0)
    each = (found.weight * (found.log_p - log_q[0][found.index])).sum(-1)
    error = each.std() / rows**0.5
    assert (each.mean() - whole).abs() < max(4 * float(error), 2e-5)
    assert float(each.mean() - whole) < 0.002 < float(whole) / 10
    # What the entries weigh in the mean over many draws is the teacher's distribution.
    drawn = torch.zeros(5000).double().scatter_add_(0, found.index.flatten(), found.weight.flatten()) / rows
    assert (drawn - log_p[0].exp()).abs().sum() < 0.02
    kl, ce = torch.empty(1).double(), torch.empty(1).double()
    sparse_losses(student.clone(), found_one(found), targets, kl, ce, temperature=1.0, kl_weight=1.0, writes=False)
    torch.testing.assert_close(kl, each[:1])


def found_one(rows: TeacherRows) -> TeacherRows:
    assert rows.index is not None
    assert rows.weight is not None
    return TeacherRows(rows.log_p[:1], rows.index[:1], rows.weight[:1], rows.n_top)


def test_bfloat16_logits_lose_no_more_than_their_rounding() -> None:
    """The fused path writes entries that have a weight from float32, not from the rounded softmax - onehot."""
    torch.manual_seed(2)
    logits = torch.randn(50, 400) * 3
    rows, targets = stored(logits.log_softmax(-1), 16, 8, half=True)(0, 50), torch.randint(0, 400, (50,))
    targets[::7] = -100
    start = (logits + torch.randn_like(logits) * 0.2).bfloat16()
    grads = []
    for dtype in (torch.bfloat16, torch.float64):
        wide = torch.float32 if dtype == torch.bfloat16 else dtype
        student, kl, ce = start.to(dtype, copy=True), torch.empty(50, dtype=wide), torch.empty(50, dtype=wide)
        sparse_losses(student, rows, targets, kl, ce, temperature=1.0, kl_weight=0.7, writes=True)
        grads.append(student.double())
    torch.testing.assert_close(grads[0], grads[1], rtol=2**-7, atol=2**-13)
    assert not grads[0][::7].any()


def test_a_vocabulary_beyond_16_bits_keeps_its_indices() -> None:
    log_p = torch.full((1, 70_000), -20.0)
    log_p[0, 69_999] = 0.0
    rows = stored(log_p.log_softmax(-1), 1, 0, half=True)(0, 1)
    assert rows.index is not None
    assert rows.index.tolist() == [[69_999]]
    assert (bytes_per_token(96, 49_152, half=True), bytes_per_token(96, 70_000, half=True)) == (388, 580)


def test_without_a_tail_the_entries_are_renormalised() -> None:
    log_p = torch.randn(5, 50).log_softmax(-1)
    rows = stored(log_p, 4, 0, half=False)(0, 5)
    torch.testing.assert_close(rows.log_p.exp().sum(-1), torch.ones(5))
    assert n_entries(4, 32, 50, tail=False) == (4, 0)
    assert (n_entries(4, 32, 50), n_entries(30, 20, 50)) == ((4, 32), (50, 0)), "a small vocabulary is whole"


def test_stored_loss_is_near_the_live_one_and_repeats_exactly(tmp_path: Path) -> None:
    def objective(store: TeacherCache | None) -> tuple[TeacherLogitsObjective, Counted]:
        teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
        student = build_model(student_spec(4, 8, 8), seed=2)
        with torch.no_grad():  # as peaked as trained models
            for parameter in (*teacher.parameters(), *student.parameters()):
                parameter.mul_(6)
        counted = Counted(teacher)
        return TeacherLogitsObjective(student, teacher, cache=store, top_k=24, tail_samples=12, half=True), counted

    def store(**more: object) -> TeacherCache:
        return TeacherCache.at(tmp_path / "store", {"teacher": "a", "block_size": 8, **more}, "path")

    live, _ = objective(None)
    first, counted = objective(store())
    expected = live.step(batch(0, 1, 2), backward)
    made = first.step(batch(0, 1, 2), backward)
    assert abs(float(made["kl"] - expected["kl"])) < 0.002 < 0.1 < float(expected["kl"])
    assert counted.sequences == 3
    again, counted = objective(store())
    read = again.step(batch(0, 1, 2), backward)
    assert counted.sequences == 0, "another run reads what the first stored"
    assert torch.equal(read["loss"], made["loss"]), "what is computed is what is read"
    mixed, counted = objective(store())
    (tmp_path / "store" / "000000" / "1.targets").unlink()
    assert torch.equal(mixed.step(batch(0, 1, 2), backward)["loss"], made["loss"])
    assert counted.sequences == 1


def test_a_store_of_something_else_is_refused_naming_both(tmp_path: Path) -> None:
    TeacherCache.at(tmp_path / "store", {"teacher": "a" * 64, "top_k": 8}, "teacher_logits.path")
    with pytest.raises(ConfigError, match=r'teacher: stored "aaaa.*, this run "bbbb.*name another folder'):
        TeacherCache.at(tmp_path / "store", {"teacher": "b" * 64, "top_k": 8}, "teacher_logits.path")
    with pytest.raises(ConfigError, match="top_k: stored 8, this run 9"):
        TeacherCache.at(tmp_path / "store", {"teacher": "a" * 64, "top_k": 9}, "teacher_logits.path")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(ConfigError, match="holds other files"):
        TeacherCache.at(tmp_path / "other", {"teacher": "a"}, "teacher_logits.path")
