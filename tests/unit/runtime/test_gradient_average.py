"""Three ranks average gradients where they lie, held against means of what each rank's backward gives alone."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from caramba.errors import CarambaError
from caramba.runtime import EmbeddingGradRows, GradientAverage, takes_rows
from caramba.runtime.gradient_average import bucket_parameters
from tests.preloaded import start_ranks
from tests.ranks import leave_together, meet

RANKS = 3
SMALL = 4 * 40  # bytes: some groups of one weight, some of several
Loss = Callable[["Weights", Tensor], Tensor]


class Weights(nn.Module):
    """A table that is used twice, as a tied head is, two matrices and a bias."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.table = nn.Parameter(torch.randn(12, 4, generator=draw))
        self.first = nn.Parameter(torch.randn(4, 4, generator=draw))
        self.second = nn.Parameter(torch.randn(4, 4, generator=draw))
        self.bias = nn.Parameter(torch.randn(4, generator=draw))


def chained(model: Weights, x: Tensor) -> Tensor:
    hidden = (x @ model.table) @ model.first.T + model.bias
    return ((hidden @ model.second) @ model.table.T).square().mean()


def by_turns(model: Weights, x: Tensor) -> Tensor:
    """Rank 1 comes to its gradients in another order than the others."""
    order = (model.first, model.second) if dist.get_rank() == 1 else (model.second, model.first)
    hidden = x @ model.table
    for weight in order:
        hidden = torch.tanh(hidden @ weight)
    return (hidden + model.bias).square().mean()


def without_bias(model: Weights, x: Tensor) -> Tensor:
    return (x @ model.table @ model.first @ model.second).square().mean()


def without_first_on_rank_1(model: Weights, x: Tensor) -> Tensor:
    hidden = x @ model.table
    return (hidden if dist.get_rank() == 1 else hidden @ model.first).square().mean()


def inputs(step: int) -> Tensor:
    return torch.randn(5, 12, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def wanted(loss: Loss, micro_steps: int) -> dict[str, Tensor | None]:
    """Return means of gradients that no hook has touched; None where no rank has one."""
    model = Weights()
    for step in range(micro_steps):
        loss(model, inputs(step)).backward()
    means: dict[str, Tensor | None] = {}
    for name, parameter in model.named_parameters():
        has = torch.tensor(float(parameter.grad is not None))
        mean = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(has)
        dist.all_reduce(mean)
        means[name] = mean / RANKS if has else None
    return means


def check(loss: Loss, *, micro_steps: int = 1, within: float = 1e-6, **words: object) -> None:
    """Average over two steps, after which gradients are the means, and every one of them where it was."""
    model = Weights()
    averaging = GradientAverage(list(model.named_parameters()), **{"group_bytes": SMALL, **words})  # type: ignore[arg-type]
    means = wanted(loss, micro_steps)
    for _ in range(2):
        for step in range(micro_steps):
            if step == micro_steps - 1:
                averaging.expect(0)
            loss(model, inputs(step)).backward()
        places = {name: one.grad.data_ptr() for name, one in model.named_parameters() if one.grad is not None}
        averaging.finish()
        for name, parameter in model.named_parameters():
            assert parameter.grad is None or places.get(name, 0) in (0, parameter.grad.data_ptr())
            mean = means[name]
            if mean is None:
                assert parameter.grad is None, (name, "no rank has had one: it is not to be decayed")
            else:
                torch.testing.assert_close(parameter.grad, mean, rtol=within, atol=within)
        model.zero_grad(set_to_none=True)
    averaging.remove()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def check_order() -> None:
    """Backward begins the exchanges: of the last weight before the first one has its gradient."""
    model = Weights()
    averaging = GradientAverage(list(model.named_parameters()), group_bytes=1)
    begun: list[int] = []
    model.table.register_post_accumulate_grad_hook(lambda _: begun.append(averaging._begun))
    averaging.expect(0)
    chained(model, inputs(0)).backward()
    assert begun[0] >= 3, "all but the table, which is used at both ends"
    averaging.finish()
    averaging.remove()


def check_refusals() -> None:
    model = Weights()
    averaging = GradientAverage(list(model.named_parameters()), group_bytes=1)
    averaging.expect(0)
    without_bias(model, inputs(0)).backward()
    with pytest.raises(CarambaError, match=r"1 weights had no gradient in a step, bias, .*find_unused"):
        averaging.finish()
    averaging.remove()
    model = Weights()
    averaging = GradientAverage(list(model.named_parameters()), group_bytes=1)
    averaging.expect(0)
    chained(model, inputs(0)).backward()
    with pytest.raises(CarambaError, match="a gradient came after the mean"):
        chained(model, inputs(1)).backward()
    averaging.exchange.wait()
    averaging.remove()


class Words(nn.Module):
    """An embedding of 40 rows, tied to its head or not."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(2)
        self.table = nn.Embedding(40, 4)
        self.table.weight = nn.Parameter(torch.randn(40, 4, generator=draw))
        self.inner = nn.Parameter(torch.randn(4, 4, generator=draw))
        self.head = None if is_tied else nn.Parameter(torch.randn(40, 4, generator=draw))

    def loss(self, step: int, tokens: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, 12, (2, tokens // 2), generator=draw)  # some of them more than once
        hidden = torch.tanh(self.table(ids) @ self.inner)
        scores = hidden @ (self.table.weight if self.head is None else self.head).T
        return nn.functional.cross_entropy(scores.flatten(0, 1), ids.flatten())


def check_rows(*, is_tied: bool, tokens: int, is_kept: bool, micro_steps: int = 1) -> None:
    model, alone = Words(is_tied=is_tied), Words(is_tied=is_tied)
    rows = EmbeddingGradRows(model.table, is_tied=is_tied)
    averaging = GradientAverage(list(model.named_parameters()), group_bytes=SMALL, rows=rows)
    for step in range(micro_steps):
        alone.loss(step, tokens).backward()
    for _ in range(2):
        for step in range(micro_steps):
            if step == micro_steps - 1:
                averaging.expect(tokens)
            loss = model.loss(step, tokens)
            loss.backward()
        assert bool(rows.kept) == is_kept
        if is_kept and is_tied:
            assert averaging._begun == len(averaging.groups), "a head's part goes with the others"
        averaging.finish()
        for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert other.grad is not None
            mean = other.grad.clone()
            dist.all_reduce(mean)
            torch.testing.assert_close(parameter.grad, mean / RANKS, rtol=1e-6, atol=1e-6, msg=name)
            found = [torch.empty_like(mean) for _ in range(RANKS)]
            assert parameter.grad is not None
            dist.all_gather(found, parameter.grad)
            assert all(torch.equal(one, found[0]) for one in found), "or ranks would drift apart"
        model.zero_grad(set_to_none=True)
    averaging.remove()
    assert "forward" not in model.table.__dict__


def rank_main(rank: int, folder: str) -> None:
    meet(rank, folder, RANKS, timedelta(minutes=5))
    for loss in (chained, by_turns):
        check(loss)
        check(loss, group_bytes=2**20)
        check(loss, micro_steps=3)
        check(loss, in_backward=False, missing="leave")
    check(chained, narrow=torch.bfloat16, within=2e-2)
    check(without_bias, missing="leave", in_backward=False)
    check(without_bias, missing="zeros")
    check(without_first_on_rank_1, missing="zeros", micro_steps=2)
    for is_tied in (True, False):
        check_rows(is_tied=is_tied, tokens=16, is_kept=True)
        check_rows(is_tied=is_tied, tokens=18, is_kept=False)  # 3 * 18 * 3 > 4 * 40
        check_rows(is_tied=is_tied, tokens=16, is_kept=is_tied, micro_steps=2)
    check_order()
    check_refusals()
    leave_together()


def test_ranks_have_the_means_of_their_gradients(tmp_path: Path) -> None:
    start_ranks(rank_main, (str(tmp_path),), RANKS)


def test_tables_with_options_of_their_own_keep_no_rows() -> None:
    assert takes_rows(nn.Embedding(4, 2))
    for table in (
        nn.Embedding(4, 2, padding_idx=0),
        nn.Embedding(4, 2, max_norm=1.0),
        nn.Embedding(4, 2, scale_grad_by_freq=True),
        nn.Embedding(4, 2, sparse=True),
        nn.Embedding(4, 2).requires_grad_(False),
        nn.Linear(4, 2),
    ):
        assert not takes_rows(table), table


def test_groups_are_of_one_dtype_and_the_last_weight_comes_first() -> None:
    sizes = (100, 10, 20, 5)
    weights = [nn.Parameter(torch.zeros(size)) for size in sizes]
    weights.append(nn.Parameter(torch.zeros(5, dtype=torch.bfloat16)))
    found = [[one.numel() for one in group] for group in bucket_parameters(weights, 4 * 30)]
    assert found == [[5], [5, 20], [10], [100]]
