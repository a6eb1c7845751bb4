"""A block's step: its means and gradients against those of the plain distance, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.distill.block_loss import BlockStep, mean_abs, mean_l1
from caramba.layer import AttentionLayer, Documents

LATENT = {
    "mode": "decoupled",
    "layout": "latent",
    "n_kv_heads": 2,
    "head_dim": 6,
    "sem_dim": 10,
    "geo_dim": 4,
}


def build(fields: dict[str, object], dtype: torch.dtype = torch.float64) -> AttentionLayer:
    torch.manual_seed(0)
    layer = AttentionLayer(AttentionLayerConfig.model_validate({"d_model": 16, "n_heads": 4, **fields}))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer.to(dtype)


def drawn(seed: int) -> Tensor:
    return torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("fields", [LATENT, {}], ids=["latent", "without a bias"])
def test_a_step_has_the_means_and_gradients_of_the_plain_distance(fields: dict[str, object], is_padded: bool) -> None:
    layer, x, target = build(fields), drawn(1), drawn(2)
    target[0, 0, 0] = layer(x)[0, 0, 0].detach()  # where the slope is 0
    documents = torch.tensor([[0] * 4 + [1] * 3 + [-1] * 2] * 2) if is_padded else None
    apart = None if documents is None else Documents.of(documents)
    layer.projection.q.requires_grad_(False)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    output, raw, size = BlockStep(layer)(x, target, apart, documents)
    got = torch.autograd.grad(raw / size * 3, trained)
    plain = layer(x, apart)
    want = mean_l1(plain, target, documents), mean_abs(target, documents)
    assert not output.requires_grad
    expected = torch.autograd.grad(want[0] / want[1] * 3, trained)
    for ours, theirs in zip((output, raw, size, *got), (plain, *want, *expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_weights_that_stay_get_no_gradient_and_half_precision_follows() -> None:
    layer, x, target = build(LATENT), drawn(1), drawn(2)
    step = BlockStep(layer)
    layer.out.weight.requires_grad_(False)
    step(x, target)[1].backward()
    assert layer.out.weight.grad is None
    assert layer.out.bias.grad is not None
    want = torch.cat([p.grad.flatten() for p in layer.parameters() if p.grad is not None])
    for dtype in (torch.bfloat16, torch.float16):
        half = build(LATENT, dtype)
        half.out.weight.requires_grad_(False)
        BlockStep(half)(x.to(dtype), target.to(dtype))[1].backward()
        got = torch.cat([p.grad.flatten() for p in half.parameters() if p.grad is not None])
        assert (got.double() - want).norm() < 0.05 * want.norm()
