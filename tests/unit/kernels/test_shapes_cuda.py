"""Kernels of a prompt's forward on a CUDA device: a length that has not been seen compiles nothing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from caramba import kernels
from caramba.ops.rms_norm import rms_norm
from caramba.ops.rope import rope
from caramba.ops.swiglu import swiglu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@torch.inference_mode()
def test_prompts_of_every_length_run_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    device, compiled = torch.device("cuda"), list[str]()
    kernels.load(device)
    weight = torch.ones(256, device=device, dtype=torch.bfloat16)

    def forward(n_rows: int, n_tokens: int) -> None:
        x = torch.randn(n_rows, n_tokens, 256, device=device).bfloat16()
        cos, sin = (torch.rand(1, n_tokens, 32, device=device) for _ in range(2))
        heads = x.unflatten(-1, (4, 64)).transpose(1, 2)
        turned = rope(heads, cos, sin, 1.0, torch.bfloat16)
        first, second = heads.float().chunk(2, dim=-1)
        wanted = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        torch.testing.assert_close(turned.float(), wanted, rtol=0.02, atol=0.02)
        normed = rms_norm(x, weight, 1e-5)
        wanted = F.rms_norm(x.float(), (256,), eps=1e-5)
        torch.testing.assert_close(normed.float(), wanted, rtol=0.02, atol=0.02)
        wide = x.repeat(1, 1, 16)
        torch.testing.assert_close(
            swiglu(wide, wide).float(), F.silu(wide.float()) * wide.float(), rtol=0.02, atol=0.02
        )

    forward(2, 64)
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", lambda **values: compiled.append(values["repr"]))
    for n_rows, n_tokens in ((1, 1), (1, 17), (3, 96), (2, 101), (4, 256)):
        forward(n_rows, n_tokens)
    assert compiled == []
