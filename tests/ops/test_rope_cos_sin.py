"""`rope_cos_sin`: its contract and its reference."""

from __future__ import annotations

import pytest
import torch

from caramba.errors import ConfigError
from caramba.ops.rope import rope_cos_sin


def test_it_is_cos_and_sin_of_positions_times_frequencies() -> None:
    offset, frequencies = torch.tensor([[3, 4], [70, 9], [0, 1]]), torch.rand(2, 5, 4)
    cos, sin = rope_cos_sin(offset, frequencies)
    wanted = torch.einsum("bt,ngp->nbgtp", offset.double(), frequencies.double())
    torch.testing.assert_close(cos.double(), wanted.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin.double(), wanted.sin(), rtol=0, atol=1e-5)
    torch.library.opcheck(torch.ops.caramba.rope_cos_sin.default, (offset.int(), frequencies))


def test_what_does_not_fit_is_refused() -> None:
    offset, frequencies = torch.zeros(2, 1, dtype=torch.int32), torch.rand(2, 1, 4)
    with pytest.raises(ConfigError, match=r"offset is torch.float32 of shape \(2, 1\), expected int32 or int64"):
        rope_cos_sin(offset.float(), frequencies)
    with pytest.raises(ConfigError, match=r"frequencies are torch.float64 \(2, 1, 4\) on cpu, expected float32"):
        rope_cos_sin(offset, frequencies.double())
