"""Time that the host spends on an eager call of each op, up to the launch and with autograd. Writes JSON.

On a CUDA device with the kernels as they are. Elsewhere with kernels compiled for sm_90 and a driver that launches
nothing: what is left is the Python of the ops, torch's dispatcher and allocations, and Triton's Python. What CUDA takes
is missing there, so figures of the two kinds do not compare. A backward holds `torch.autograd.grad` itself, which is
measured next to it.

Usage: python scripts/bench/run.py host_cost [--only rms_norm,rope] [--calls 400] [--profile] [--out FILE]
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
from collections.abc import Callable
from typing import Any

import torch
from cases import decode_cases
from cases.kernels import HOST_MUST_US, cases, outputs
from record import Record, machine_facts
from registry import UsageError
from timing import host_seconds
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from caramba import kernels
from caramba.ops.backend import all_ops
from caramba.ops.dba_append import dba_append
from caramba.ops.dba_decode import dba_decode


class _Utilities:
    """What a compiled kernel asks of CUDA when it is loaded."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), 1, 32, 0, 1024


class _Launcher:
    """Takes what CUDA's launcher takes."""

    def __init__(self, src: Any, metadata: Any) -> None:
        pass

    def __call__(self, *args: Any) -> None:
        pass


class _Driver:
    """An H200 that does nothing."""

    launcher_cls = _Launcher
    utils = _Utilities()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"


def launch_nothing() -> None:
    """Make it the driver of this process."""
    driver.set_active(_Driver())  # pyright: ignore[reportArgumentType]


ROWS, TOKENS, RUN = 4, 512, 10
FORWARD = "forward"  # without gradients
Call = Callable[[], Any]


def attach_here(device: torch.device) -> None:
    """Attach the Triton launchers, on a CPU with nothing behind them."""
    if device.type == "cuda":
        kernels.load(device, "require")
        return
    launch_nothing()
    kernels.BACKENDS["cpu"] = "triton"
    kernels.load(device)


def calls_of_elementwise(device: torch.device, only: set[str]) -> dict[str, dict[str, Call]]:
    """Return each op's eager calls: without gradients, with them, and the backward."""
    found: dict[str, dict[str, Call]] = {}
    for case in cases(device, torch.bfloat16):
        if case.name.endswith("8192") or (only and case.op not in only):
            continue
        tensors = case.make(min(case.rows, ROWS))
        if case.host is not None:
            found[case.name] = {FORWARD: case.host(tensors)}
            continue
        results = [y for y in outputs(case.ours(*tensors)) if y.requires_grad]
        wanted = [x for x in tensors if x.requires_grad]
        grads = [torch.randn_like(y) for y in results]

        def call(case: Any = case, tensors: Any = tensors) -> None:
            case.ours(*tensors)

        def backward(results: Any = results, wanted: Any = wanted, grads: Any = grads) -> None:
            torch.autograd.grad(results, wanted, grads, retain_graph=True)

        found[case.name] = {FORWARD: call, "forward with gradients": call, "backward": backward}
    return found


def calls_of_decode(device: torch.device, only: set[str]) -> dict[str, dict[str, Call]]:
    """Return a decode step of every layout of the decode benchmark, in 16 bits and mixed."""
    found: dict[str, dict[str, Call]] = {}
    for layout in decode_cases.LAYOUTS if not only or "dba_decode" in only else ():
        for form in ("bf16", "mixed"):
            store = decode_cases.make(layout, form, 1, TOKENS, str(device))
            q = decode_cases.queries(layout, 1, str(device), torch.bfloat16)
            seqlens = torch.full((1,), TOKENS, dtype=torch.int32, device=device)
            packed = None if form == "bf16" else seqlens - decode_cases.TAIL // 2
            streams: list[Any] = [*store.streams, None][:3]

            step = functools.partial(
                dba_decode, q[0], q[1], *streams, seqlens, n_packed=packed, max_seqlen=TOKENS
            )
            found[f"dba_decode {layout.name} {form}"] = {FORWARD: step}
    return found


def calls_of_append(device: torch.device, only: set[str]) -> dict[str, dict[str, Call]]:
    """Return how a token gets into a cache of every layout of the decode benchmark, in 16 bits."""
    found: dict[str, dict[str, Call]] = {}
    for layout in decode_cases.LAYOUTS if not only or "dba_append" in only else ():
        kv, widths, turned = layout.kv_heads, layout.widths, layout.dims[1] // 2
        # As projections give them, heads inside tokens; a latent is stored next to its geometric keys.
        streams = [
            torch.randn(1, 1, kv, width, device=device, dtype=torch.bfloat16).transpose(1, 2)
            for width in widths
        ]
        buffers = [
            torch.zeros(1, kv, TOKENS, width, device=device, dtype=torch.bfloat16)
            for width in ([sum(widths)] if layout.latent else widths)
        ]
        lengths = torch.full((1,), TOKENS // 2, dtype=torch.int32, device=device)
        cos, sin = (torch.ones(1, 1, turned, device=device) for _ in range(2))
        step = functools.partial(dba_append, streams, buffers, lengths, cos, sin, 1)
        found[f"dba_append {layout.name} bf16"] = {FORWARD: step}
    return found


def calls_of_autograd(device: torch.device) -> dict[str, dict[str, Call]]:
    """Return a backward that does nothing, which is what autograd itself takes."""

    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    x = torch.ones(ROWS, 64, device=device, requires_grad=True)
    y: Any = Nothing.apply(x)
    grad = torch.ones_like(y)
    return {"nothing": {"backward": lambda: torch.autograd.grad(y, x, grad, retain_graph=True)}}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default="", help="names of ops, with commas")
    parser.add_argument("--calls", type=int, default=400, help="of each op and kind")
    parser.add_argument("--profile", action="store_true", help="print where the time of each call goes")


def run(options: argparse.Namespace, record: Record) -> int | None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    attach_here(device)
    only = {name for name in options.only.split(",") if name}
    found = calls_of_elementwise(device, only) | calls_of_decode(device, only)
    found |= calls_of_append(device, only)
    if not found:
        raise UsageError(f"--only {options.only}: no such op; expected any of {', '.join(all_ops())}")
    found |= calls_of_autograd(device)
    rows = []
    for name, kinds in found.items():
        us = {}
        for kind, call in kinds.items():
            # Around all calls: to turn gradients off takes a microsecond or two, once for a whole step.
            with torch.set_grad_enabled(kind != FORWARD):
                call()
                us[kind] = 1e6 * host_seconds(call, device, RUN, max(1, options.calls // RUN))
                if options.profile:
                    profile = cProfile.Profile()
                    profile.runcall(lambda call=call: [call() for _ in range(options.calls)])
                    pstats.Stats(profile).sort_stats("tottime").print_stats(18)
        rows.append({"name": name, "us": us, "must_us": HOST_MUST_US})
        print(f"{name:44s}" + ", ".join(f"{kind} {cost:.1f} us" for kind, cost in us.items()), flush=True)
    record.write_data(
        {
            **record.head(
                machine_facts(device) | {"launches": "on the device" if device.type == "cuda" else "nothing"}
            ),
            "rows": rows,
        },
    )
    return 0
