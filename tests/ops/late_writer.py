"""A kernel that lets the next one begin and stores long after: what of it a kernel reads that does not wait is old."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from caramba.kernels.triton.pdl import supports_pdl
from torch import Tensor

STEPS = 16384
"""Steps of what is computed before anything is stored. Each needs the one before, which takes four cycles or more: some
35 us at 1.9 GHz, of which a kernel that begins early needs a few to read what it reads."""


@triton.jit
def _store_late(to, given, one, n, steps, BLOCK: tl.constexpr):  # noqa: N803
    tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, BLOCK)
    x = tl.load(given + i, mask=i < n)
    late = tl.load(one)  # a number that no compiler knows: what is made of it cannot be left out
    for _ in range(steps):
        late = late * 0.5 + 1.0
    # 2 by now, whatever it was.
    tl.store(to + i, x, mask=(i < n) & (late < 3.0))


@triton.jit
def _read(found, of, WAITS_FIRST: tl.constexpr):  # noqa: N803
    if WAITS_FIRST:
        tl.extra.cuda.gdc_wait()
    tl.store(found, tl.load(of))
    if not WAITS_FIRST:  # nor does this one end before the kernel ahead
        tl.extra.cuda.gdc_wait()


def store_late(to: Tensor, given: Tensor) -> None:
    """Copy `given` to `to`, of as many elements and the same dtype, both contiguous, at the end of some tens of us.

    What is launched next and may begin early begins at the start of these. Needs a device that has that
    (`skip_where_nothing_begins_early`).
    """
    assert to.dtype == given.dtype
    assert to.shape == given.shape
    assert to.is_contiguous()
    assert given.is_contiguous()
    one = torch.ones(1, dtype=torch.float32, device=to.device)
    _store_late[(1,)](to, given, one, to.numel(), STEPS, BLOCK=triton.next_power_of_2(to.numel()), num_warps=4)


def read_early(found: Tensor, of: Tensor, waits_first: bool) -> None:
    """Copy the first element of `of` to that of `found`, of the same dtype, in a kernel that may begin while the one ahead
    ends: it waits for that before it reads, or after."""
    _read[(1,)](found, of, WAITS_FIRST=waits_first, num_warps=1, launch_pdl=True)


def skip_where_nothing_begins_early(device: str) -> None:
    """Skip the test on a device on which no kernel begins before the one ahead has ended."""
    if not supports_pdl(torch.device(device)):
        pytest.skip("no kernel begins early on this device")
