"""Head and cross-entropy, forward and backward: ours, its reference, and torch with all logits. Writes JSON.

Usage on a GPU: python scripts/bench/run.py linear_cross_entropy [--out docs/benchmarks/linear_cross_entropy.json]
A machine without one runs it with --tokens 64 --width 32 --vocabulary 500, which shows that it works and no more.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from record import Record, shown
from timing import interleave, spread, wall_seconds
from torch import Tensor
from torch.nn import functional as F

from caramba import kernels
from caramba.ops import implementation
from caramba.ops.linear_cross_entropy import (
    linear_cross_entropy,
    reference_cross_entropy_rows,
    rows_per_chunk,
)

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
ROUNDS = 9


def dense(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """All logits, softmax in fp32, as a training loop has it."""
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def reference_by_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The op with its softmax in plain PyTorch, whatever is attached."""
    present = torch.ops.caramba.cross_entropy_rows.default
    torch.ops.caramba.cross_entropy_rows.default = reference_cross_entropy_rows
    try:
        return linear_cross_entropy(hidden, weight, targets)
    finally:
        torch.ops.caramba.cross_entropy_rows.default = present


def sides(device: torch.device, chunks: list[int]) -> dict[str, Loss]:
    """Return what is compared, by name."""
    return {
        "caramba": linear_cross_entropy,
        **{f"caramba, chunk {rows}": partial(linear_cross_entropy, chunk=rows) for rows in chunks},
        "caramba, reference softmax": reference_by_chunks,
        "torch, all logits": dense,
        **({"torch.compile, all logits": torch.compile(dense)} if device.type == "cuda" else {}),
    }


def measure(
    losses: dict[str, Loss], hidden: Tensor, weight: Tensor, targets: Tensor
) -> dict[str, dict[str, Any]]:
    """Time every side in turn, `ROUNDS` times over; a side that runs out of memory is recorded as that."""
    found: dict[str, dict[str, Any]] = {}
    for name, loss in losses.items():
        try:
            found[name] = memory(loss, hidden, weight, targets)
            backward(loss, hidden, weight, targets)
        except torch.cuda.OutOfMemoryError as error:
            found[name] = {"refused": str(error).splitlines()[0]}
            torch.cuda.empty_cache()
    (n, m), v = hidden.shape, len(weight)

    def run(name: str) -> float:
        return wall_seconds(lambda: backward(losses[name], hidden, weight, targets), hidden.device)

    runs = {name: partial(run, name) for name, row in found.items() if "refused" not in row}
    for name, series in interleave(runs, repeats=ROUNDS).items():
        found[name] |= spread(series) | {"tflops": 6 * n * m * v / statistics.median(series) / 1e12}
    return found


def backward(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    hidden.grad = weight.grad = None
    value = loss(hidden, weight, targets)
    value.backward()
    return value.detach()


def memory(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Any]:
    """Peak bytes besides the inputs: with the two gradients, without them, and without the weight's alone."""
    if not hidden.is_cuda:
        backward(loss, hidden, weight, targets)
        return {}
    backward(loss, hidden, weight, targets)  # compiles, and gives cuBLAS its workspace
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    backward(loss, hidden, weight, targets)
    peak = torch.cuda.max_memory_allocated() - before
    gradients = sum(x.numel() * x.element_size() for x in (hidden, weight))
    weight_gradient = weight.numel() * weight.element_size()
    sizes = {"peak_bytes": peak, "extra_bytes": peak - gradients}
    return sizes | {"beside_dweight_bytes": peak - weight_gradient}


def errors(
    losses: dict[str, Loss], hidden: Tensor, weight: Tensor, targets: Tensor
) -> dict[str, dict[str, float]]:
    """Relative error of loss and gradients against float64, on the first 512 tokens."""
    few, wanted = hidden.detach()[:512], targets[:512]
    h, w = (x.detach().double().requires_grad_() for x in (few, weight))
    exact = linear_cross_entropy(
        h, w, wanted, chunk=128
    )  # float64, compared with all logits in the unit tests
    exact.backward()
    out = {}
    for name, loss in losses.items():
        leaf = few.clone().requires_grad_()
        value = backward(loss, leaf, weight, wanted)
        pairs = ((leaf.grad, h.grad), (weight.grad, w.grad))
        out[name] = {"loss": abs(float(value) - float(exact.detach())) / float(exact.detach())} | {
            part: float((ours.double() - theirs).norm() / theirs.norm())
            for part, (ours, theirs) in zip(("dhidden", "dweight"), pairs, strict=True)
        }
    return out


OPTIONS = "--tokens=16384 --width=2048 --vocabulary=128256 --chunks=1024,1536,4096"
SMOKE_OPTIONS = "--tokens 32 --width 32 --vocabulary 64 --chunks 16,"


def run(options: argparse.Namespace, record: Record) -> None:
    device = record.device
    kernels.load(device)
    n, m, v = options.tokens, options.width, options.vocabulary
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    hidden = torch.randn(n, m, device=device, dtype=dtype).requires_grad_()
    weight = torch.randn(v, m, device=device, dtype=dtype).mul_(m**-0.5).requires_grad_()
    targets = torch.randint(v, (n,), device=device)
    losses = sides(device, options.chunks)
    rows = measure(losses, hidden, weight, targets)
    runs = {name: loss for name, loss in losses.items() if "refused" not in rows[name]}
    for name, wrong in errors(runs, hidden, weight, targets).items():
        rows[name]["error"] = wrong
    master = weight.detach().float().requires_grad_()
    rows["caramba, fp32 weight gradient"] = measure({"": linear_cross_entropy}, hidden, master, targets)[""]
    for name, row in rows.items():
        print(f"{name:28s} {shown(row)}")
    record.start(sizes={"tokens": n, "width": m, "vocabulary": v, "dtype": str(dtype)})
    record.save(
        operations=6 * n * m * v,
        chunk=rows_per_chunk(hidden, v),
        implementation=implementation("cross_entropy_rows", device),
        rows=rows,
    )
