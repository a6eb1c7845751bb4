"""The kernel that stores late: it is compiled as it is meant, and on a GPU a missing wait shows behind it."""

from __future__ import annotations

import os
import re

import pytest
import torch

from tests.ops.hopper import hopper

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has no kernels that begin early"
)
pytest.importorskip("triton")


@pytest.mark.parametrize(("dtype", "n"), [(torch.int32, 16), (torch.bfloat16, 2048)], ids=str)
def test_others_may_begin_before_it_computes_and_it_stores_behind_that(dtype: torch.dtype, n: int) -> None:
    from tests.ops.late_writer import store_late

    with hopper() as made:
        store_late(torch.empty(n, dtype=dtype), torch.empty(n, dtype=dtype))
    ((_, kernel),) = made
    ptx = kernel.asm["ptx"]
    assert not kernel.metadata.launch_pdl, "what lies ahead of it has ended"
    assert ptx.count("griddepcontrol") == 1
    begins = ptx.index("griddepcontrol.launch_dependents")
    # A loop jumps back, to a place behind the announcement; all is stored behind it. A compiler may make several of one.
    labels = {at[1]: at.start() for at in re.finditer(r"^(\$\w+):", ptx, re.M)}
    jumps = [(labels[at[1]], at.start()) for at in re.finditer(r"\bbra(?:\.uni)?\s+(\$\w+);", ptx)]
    loops = [(to, at) for to, at in jumps if to < at]
    start, end = min(to for to, _ in loops), max(at for _, at in loops)
    stores = [at.start() for at in re.finditer(r"\bst\.global", ptx)]
    assert begins < start < end < min(stores)
    assert re.search(r"\bfma\.rn(\.ftz)?\.f32", ptx[start:end])


@pytest.mark.parametrize("waits_first", [False, True])
def test_what_reads_behind_it_waits_before_it_reads_or_after(waits_first: bool) -> None:
    from tests.ops.late_writer import read_early

    x = torch.empty(1, dtype=torch.int32)
    with hopper() as made:
        read_early(x, x, waits_first)
    ((_, kernel),) = made
    assert kernel.metadata.launch_pdl
    before, after = kernel.asm["ptx"].split("griddepcontrol.wait")
    assert ("ld.global" in before, "ld.global" in after) == (not waits_first, waits_first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("waits_first", [False, True])
def test_a_kernel_that_does_not_wait_reads_what_was_there_before(waits_first: bool) -> None:
    from tests.ops.late_writer import read_early, skip_where_nothing_begins_early, store_late

    skip_where_nothing_begins_early("cuda")
    held, found = (torch.zeros(16, dtype=torch.int32, device="cuda") for _ in range(2))
    given = torch.ones_like(held)

    def step() -> None:
        store_late(held, given)
        read_early(found, held, waits_first)

    step()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    seen = set()
    for _ in range(20):
        held.zero_()
        found.fill_(-1)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        assert (held == 1).all()
        seen.add(int(found[0]))
    assert seen <= {0, 1}
    assert (0 in seen) != waits_first
