"""The rate at which a kernel that only reads gets through memory: the roof of a decode step."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from timing import median_seconds


@triton.jit
def add_up(x, out, n, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # noqa: N803
    """Add up ROUNDS blocks."""
    pid = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(ROUNDS):
        at = (pid.to(tl.int64) * ROUNDS + i) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(x + at, at < n, other=0.0)
    tl.store(out + pid, tl.sum(total))


def read_bandwidth(repeats: int = 20) -> float:
    """Return bytes per second, the median over reads of 4 GiB of random numbers."""
    x = torch.randn(1 << 30, device="cuda")
    n_programs = triton.cdiv(x.numel(), 4096 * 16)
    out = torch.empty(n_programs, device="cuda")

    def read() -> None:
        add_up[(n_programs,)](x, out, x.numel(), BLOCK=4096, ROUNDS=16, num_warps=8)

    return x.numel() * 4 / median_seconds(read, x.device, repeats)
