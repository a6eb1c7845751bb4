"""Products of 8-bit activations: a token's codes are its own, and the border between two of them is what parts texts."""

from __future__ import annotations

import torch

from caramba.lower.quantize import DynamicLinear


def build() -> DynamicLinear:
    source = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (24, 64), dtype=torch.int8, generator=source)
    smoothing = torch.rand(64, generator=source) + 0.5
    return DynamicLinear(codes, torch.rand(24, generator=source), smoothing, torch.randn(24, generator=source))


def test_a_token_is_the_same_to_the_last_bit_in_any_company() -> None:
    """Trap: one scale for a forward, by which tokens that speculation verifies at once differ from those one by one."""
    layer = build()
    x = torch.randn(3, 6, 64, generator=torch.Generator().manual_seed(1))
    x[0, 2] *= 1000
    x[1, 4] = 0
    together = layer(x)
    for row, token in torch.cartesian_prod(torch.arange(3), torch.arange(6)).tolist():
        alone = layer(x[row : row + 1, token : token + 1])
        assert torch.equal(alone[0, 0], together[row, token])


def test_the_last_bit_of_an_activation_on_a_border_is_a_whole_code() -> None:
    """What parts a text under speculation: the inputs of two forwards differ in their last bits, whatever the scale."""
    layer = build()
    assert layer.inverse is not None
    step = torch.tensor(2.0**-7)
    x = torch.zeros(2, 64)
    x[:, 0] = layer.most * step  # the largest, so that `step` is the scale of both tokens
    x[0, 1] = 10.5 * step
    x[1, 1] = torch.nextafter(x[0, 1], torch.tensor(1.0))
    plain = DynamicLinear(layer.codes, layer.scale, None, None)
    found = plain(x)
    wanted = step * layer.scale * layer.codes[:, 1].float()
    torch.testing.assert_close(found[1] - found[0], wanted, rtol=1e-4, atol=1e-4)
    assert wanted.abs().max() > 1e4 * float(x[1, 1] - x[0, 1])
