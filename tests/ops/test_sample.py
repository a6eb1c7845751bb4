"""`sample`: its contract and its reference."""

from __future__ import annotations

import pytest
import torch

from caramba.config.generate import GenerateConfig
from caramba.errors import ConfigError
from caramba.infer.step import distribution
from caramba.ops.sample import draw, sample

WIDE = torch.float64


def test_it_is_what_a_draw_takes_from_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(40, 50, generator=generator)
    temperature = torch.tensor([0.0, 0.3, 1.0, 2.5], dtype=WIDE).repeat(10)
    uniform = torch.rand(40, generator=generator, dtype=WIDE)
    uniform[:8] = torch.tensor([0.0, 1 - 2**-53], dtype=WIDE).repeat_interleave(4)
    token, logprob = sample(logits, temperature, uniform)
    for row in range(40):
        probs = distribution(logits[row], GenerateConfig(temperature=float(temperature[row])))
        assert int(token[row]) == int(draw(probs, uniform[row]))
    torch.testing.assert_close(logprob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
    torch.library.opcheck(torch.ops.caramba.sample.default, (logits, temperature, uniform))
    with pytest.raises(ConfigError, match=r"sample: logits are .*\(40, 0\).*expected floating \[B, V\], V >= 1"):
        sample(logits[:, :0], temperature, uniform)
    with pytest.raises(ConfigError, match=r"torch.float64 \(3,\).*, expected float64 \[40\]"):
        sample(logits, temperature[:3], uniform)
