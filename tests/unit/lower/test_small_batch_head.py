"""Heads of few rows by the kernel: the logits of the plain head, in small batches alone."""

from __future__ import annotations

import pytest
import torch
from tests.unit.lower.test_norm_linear import Ops
from tests.unit.model.model_specs import transformer

from caramba.lower.lowering import lower
from caramba.model import Head, TiedHead, build_model
from caramba.ops import backend


@pytest.mark.parametrize(("is_tied", "kind"), [(True, TiedHead), (False, Head)])
@torch.inference_mode()
def test_lowered_head_gives_the_plain_logits(is_tied: bool, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = transformer("gqa_scaled")
    head = spec.head.model_copy(update={"tied": is_tied, "bias": not is_tied})
    model = build_model(spec.model_copy(update={"head": head}), seed=0).eval()
    if model.head.__class__ is Head:
        torch.nn.init.normal_(model.head.bias)
    few, many = (torch.randn(rows, spec.embedder.d_model) for rows in (1, 9))
    wanted, names = (model.logits(few), model.logits(many)), list(model.state_dict())
    with lower(model, "cpu", "decode") as lowered:
        assert lowered.replaced["small_batch_head"] == 0  # no kernel
    monkeypatch.setitem(backend._attached, ("small_batch_linear", "cpu"), "triton")
    with lower(model, "cpu", "decode") as lowered:
        assert lowered.replaced["small_batch_head"] == 1
        assert list(model.state_dict()) == names
        with Ops() as ops:
            torch.testing.assert_close(model.logits(few), wanted[0], rtol=1e-6, atol=1e-6)
        assert ops.ran["small_batch_linear"] == 1
        with Ops() as ops:
            assert torch.equal(model.logits(many), wanted[1])
        assert ops.ran["small_batch_linear"] == 0
    assert type(model.head) is kind
