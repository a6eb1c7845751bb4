"""Agreement with a teacher against the formulas written out, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from caramba.config.kvcache import KVCacheKind
from caramba.data import IGNORED
from caramba.errors import CarambaError, DataError
from caramba.infer.agreement import agreement
from caramba.infer.nll import windowed_nll
from caramba.model import build_model
from tests.unit.surgery.models import VOCAB, latent_spec, loud, make_teacher

CPU = torch.device("cpu")
LENGTH = 300  # two windows are more than one chunk of logits


class Windows:
    """Random windows, the first with targets that do not count; with `apart` also document ids."""

    def __init__(self, n: int = 5, *, apart: bool = False) -> None:
        self.tokens = torch.randint(VOCAB, (n, LENGTH + 1), generator=torch.Generator().manual_seed(2))
        self.apart = apart

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        x, y = self.tokens[index, :-1], self.tokens[index, 1:].clone()
        if index == 0:
            y[:40] = IGNORED
        return (x, y, torch.arange(LENGTH) // 100) if self.apart else (x, y)


@torch.no_grad()
def test_losses_divergence_and_agreement_are_the_formulas_over_the_targets_that_count():
    teacher, student = make_teacher(), loud(build_model(latent_spec(6, 4), seed=1)).double().eval()
    windows = Windows()
    found = agreement(teacher, student, windows, windows=5, batch_size=4, device=CPU)
    x, y = (torch.stack(parts) for parts in zip(*(windows[i] for i in range(5)), strict=True))
    log_p, log_q = (F.log_softmax(model(x), -1) for model in (teacher, student))
    counts = y != IGNORED
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[counts]
    assert found.kl == pytest.approx(kl.mean().item(), rel=1e-12)
    assert found.top1 == (log_p.argmax(-1) == log_q.argmax(-1))[counts].double().mean().item()
    nll = [F.nll_loss(scores.transpose(1, 2), y, reduction="none") for scores in (log_p, log_q)]
    assert found.delta_nll == pytest.approx((nll[1] - nll[0])[counts].mean().item(), rel=1e-11)
    assert found.model.tokens == int(counts.sum()) == 5 * LENGTH - 40
    assert [(one.start, one.end) for one in found.by_position] == [
        (0, 15),
        (16, 63),
        (64, 127),
        (128, 255),
        (256, 299),
    ]
    for one in found.by_position:
        part = slice(one.start, one.end + 1)
        kept = counts[:, part]
        assert math.log(one.ppl_ratio) == pytest.approx((nll[1] - nll[0])[:, part][kept].mean().item(), rel=1e-9)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1)[:, part][kept]
        assert one.kl == pytest.approx(divergence.mean().item(), rel=1e-9)
        agrees = (log_p.argmax(-1) == log_q.argmax(-1))[:, part][kept]
        assert one.top1 == pytest.approx(agrees.double().mean().item(), rel=1e-12)
    means = torch.stack([((nll[1] - nll[0])[i][counts[i]]).mean() for i in range(5)])
    assert found.delta_standard_error == pytest.approx(means.std().item() / math.sqrt(5), rel=1e-9)
    low, high = found.interval or (0.0, 0.0)
    assert low < found.ppl_ratio < high
    assert found.ppl_ratio == math.exp(found.delta_nll)


def test_the_loss_is_that_of_perplexity_and_a_teacher_agrees_with_itself():
    teacher = make_teacher().float()
    same = agreement(teacher, teacher, Windows(apart=True), windows=5, batch_size=2, device=CPU)
    alone = windowed_nll(teacher, Windows(apart=True), windows=5, batch_size=2, device=CPU)
    assert same.model.mean == pytest.approx(alone.mean, rel=1e-6)
    assert (same.kl, same.top1, same.ppl_ratio, same.delta_standard_error) == (0.0, 1.0, 1.0, 0.0)


def test_a_cache_is_read_through_and_its_rounding_shows():
    teacher = make_teacher().float()
    exact, bf16, q8, q4 = (
        agreement(teacher, teacher, Windows(2), windows=2, batch_size=2, device=CPU, kind=kind)
        for kind in (KVCacheKind.FP32, KVCacheKind.BF16, KVCacheKind.Q8_0, KVCacheKind.Q4_0)
    )
    assert abs(exact.kl) < 1e-6 < bf16.kl < q8.kl < q4.kl
    with pytest.raises(DataError, match=r"a cache of kind bf16 holds one document per row"):
        agreement(
            teacher,
            teacher,
            Windows(2, apart=True),
            windows=2,
            batch_size=2,
            device=CPU,
            kind=KVCacheKind.BF16,
        )


def test_a_diverged_model_is_an_error():
    broken = make_teacher()
    with torch.no_grad():
        broken.embedder.token.weight.fill_(float("nan"))
    with pytest.raises(CarambaError, match="not finite"):
        agreement(make_teacher(), broken, Windows(1), windows=1, batch_size=1, device=CPU)
