"""Losses of packed rows are those of their documents alone: no loss sees padding or crosses a document."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.data import IGNORED, batches
from caramba.distill import (
    Backward,
    BlockwiseObjective,
    LanguageModelObjective,
    Objective,
    TeacherLogitsObjective,
    block_errors,
)
from caramba.distill.block_loss import attention_kl, attention_log_probabilities
from caramba.distill.blockwise import capture_attention_io
from caramba.infer.nll import windowed_nll
from caramba.layer import Documents
from caramba.model import build_model
from caramba.surgery import pair_attention
from tests.unit.surgery.test_weight_svd import TOKENS, spec, student_spec

# A row of two documents of 5 and 3 predictions and 2 places of padding, a row of one document and 3 of padding.
LENGTHS = [[5, 3], [7]]
WIDTH = 10


def packed() -> tuple[tuple[Tensor, ...], list[tuple[Tensor, Tensor]]]:
    """The batch (x, y, document ids), and each document's own (x, y)."""
    x, y = torch.zeros(2, WIDTH, dtype=torch.int64), torch.full((2, WIDTH), IGNORED)
    ids, alone = torch.full((2, WIDTH), -1), []
    for row, lengths in enumerate(LENGTHS):
        place = 0
        for number, n in enumerate(lengths):
            document = TOKENS[(row + number) % len(TOKENS), place : place + n + 1]
            here = slice(place, place + n)
            x[row, here], y[row, here], ids[row, here] = document[:-1], document[1:], number
            alone.append((document[None, :-1], document[None, 1:]))
            place += n
    return (x, y, ids), alone


def gradients(objective: Objective, batch: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the step's loss and the gradient of every trained weight."""
    objective.model.zero_grad()
    backward: Backward = lambda loss: loss.backward()  # noqa: E731
    loss = objective.step(batch, backward)["loss"]
    found = {name: p.grad.clone() for name, p in objective.trainable() if p.grad is not None}
    return loss, found


def test_language_model_and_teacher_losses_are_means_over_document_targets() -> None:
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False).double()
    student = build_model(student_spec(4, 8, 8), seed=2).double()
    batch, alone = packed()
    counts = torch.tensor([y.numel() for _, y in alone], dtype=torch.float64)
    for objective in (
        LanguageModelObjective(student),
        TeacherLogitsObjective(student, teacher, temperature=2.0),
    ):
        loss, together = gradients(objective, batch)
        each = [gradients(objective, document) for document in alone]
        expected = sum(n * one[0].double() for n, one in zip(counts, each, strict=True)) / counts.sum()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(objective.evaluate(batch)["loss"], loss)
        assert together
        for name, gradient in together.items():
            mean = sum(n * one[1][name] for n, one in zip(counts, each, strict=True)) / counts.sum()
            torch.testing.assert_close(gradient, mean, rtol=1e-4, atol=1e-7)


def test_blockwise_losses_leave_padding_out() -> None:
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    student = build_model(student_spec(4, 8, 8), seed=2)
    pairs = pair_attention(teacher, student)
    batch, alone = packed()
    errors = block_errors(teacher, pairs, batch[0], batch[2])
    for on_student in (False, True):
        objective = BlockwiseObjective(student, teacher, pairs, on_student=on_student)
        loss, together = gradients(objective, batch)
        torch.testing.assert_close(objective.evaluate(batch)["loss"], loss)
        # What stands in padding changes nothing.
        noisy = batch[0].clone()
        noisy[batch[2] < 0] = 3
        again, same = gradients(objective, (noisy, *batch[1:]))
        torch.testing.assert_close(again, loss)
        for name, gradient in together.items():
            torch.testing.assert_close(same[name], gradient)
    # Without packing: each block's distances and sizes, added up over the documents.
    assert len(errors) == len(pairs)
    totals = torch.zeros(len(pairs), 2, dtype=torch.float64)
    names = [name for name, _, _ in pairs]
    students = {name: layer for name, _, layer in pairs}

    def add(name: str, x: Tensor, target: Tensor) -> None:
        distance = (students[name](x) - target).abs().sum()
        totals[names.index(name)] += torch.stack([distance, target.abs().sum()]).double()

    for x, _ in alone:
        capture_attention_io(teacher, [(name, source) for name, source, _ in pairs], x, add)
    expected = (totals[:, 0] / totals[:, 1]).tolist()
    torch.testing.assert_close(torch.tensor(errors, dtype=torch.float64), torch.tensor(expected).double())


def test_attention_is_compared_within_documents() -> None:
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    _, source, layer = pair_attention(teacher, build_model(student_spec(4, 8, 8), seed=2))[0]
    x = torch.randn(1, 7, source.config.d_model, generator=torch.Generator().manual_seed(0))
    apart = Documents.of(torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))
    rows = torch.arange(7)[None]
    for each in (source, layer):
        together = attention_log_probabilities(each, x, rows, apart)
        alone = attention_log_probabilities(each, x[:, 3:], rows[:, :4])
        torch.testing.assert_close(together[:, :, 3:, 3:], alone)
        assert bool((together[:, :, 3:, :3] == float("-inf")).all())


def test_attention_of_padding_does_not_count() -> None:
    teacher = build_model(spec(), seed=1).eval().requires_grad_(False)
    _, source, layer = pair_attention(teacher, build_model(student_spec(4, 8, 8), seed=2))[0]
    x = torch.randn(1, 9, source.config.d_model, generator=torch.Generator().manual_seed(0)) * 4
    ids, every = torch.tensor([[0, 0, 0, 0, 0, -1, -1, -1, -1]]), torch.arange(9)[None]
    padded = attention_kl(source, layer, x, x, every, Documents.of(ids), ids >= 0)
    torch.testing.assert_close(padded, attention_kl(source, layer, x[:, :5], x[:, :5], every[:, :5]))
    # The objective passes on what is padding.
    one = [("one", source, layer)]
    ours = BlockwiseObjective(teacher, teacher, one, attention_weight=1.0, n_queries=9)
    tokens = torch.arange(9)[None]
    with_padding = ours.evaluate((tokens, tokens, ids))["attention_kl/one"]
    alone = ours.evaluate((tokens[:, :5], tokens[:, :5]))["attention_kl/one"]
    torch.testing.assert_close(with_padding, alone)


def test_held_out_loss_counts_each_documents_targets_once() -> None:
    model = build_model(spec(), seed=1).eval()
    batch, alone = packed()
    rows = [tuple(part[row] for part in batch) for row in range(2)]
    device = torch.device("cpu")
    found = windowed_nll(model, rows, windows=2, batch_size=2, device=device)
    each = [windowed_nll(model, [(x[0], y[0])], windows=1, batch_size=1, device=device) for x, y in alone]
    assert found.tokens == sum(one.tokens for one in each) == 15
    assert abs(found.total - sum(one.total for one in each)) < 1e-4
    assert abs(found.window_means[1] - each[2].mean) < 1e-5
    assert [part.shape for part in next(batches(rows, [0, 1], 2))] == [(2, WIDTH)] * 3
