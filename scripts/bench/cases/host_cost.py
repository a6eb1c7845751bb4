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
from cases.kernels import HOST_MUST_US, cases, host_calls
from record import Record, machine_facts
from registry import check_names
from timing import host_seconds
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from caramba import kernels
from caramba.ops.backend import all_ops
from caramba.ops.dba_append import dba_append
from caramba.ops.dba_decode import dba_decode


class _Driver:
    """An H200 that does nothing: it answers what Triton asks of a driver, its utilities and its launcher."""

    def __init__(self) -> None:
        self.utils = self
        self.launcher_cls = lambda src, metadata: lambda *args: None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return object(), 1, 32, 0, 1024

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> str:
        return "cpu"


ROWS, TOKENS, RUN = 4, 512, 10
FORWARD = "forward"  # without gradients
Call = Callable[[], Any]


def attach_here(device: torch.device) -> None:
    """Attach the Triton launchers, on a CPU with nothing behind them."""
    if device.type == "cuda":
        kernels.load(device, "require")
        return
    driver.set_active(_Driver())  # pyright: ignore[reportArgumentType]
    kernels.BACKENDS["cpu"] = "triton"
    kernels.load(device)


def calls_of_elementwise(device: torch.device, only: set[str]) -> dict[str, dict[str, Call]]:
    """Return each op's eager calls: without gradients, with them, and the backward."""
    found: dict[str, dict[str, Call]] = {}
    for case in cases(device, torch.bfloat16):
        if not case.name.endswith("8192") and (not only or case.op in only):
            calls = host_calls(case, ROWS)
            with_gradients = {"forward with gradients": calls[FORWARD]} if len(calls) > 1 else {}
            found[case.name] = calls | with_gradients
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


OPTIONS = "--only=* --calls=400 --profile"
SMOKE_OPTIONS = "--only swiglu --calls 5 --device cpu"
OWN_PROCESS = True  # whose driver launches nothing


def run(options: argparse.Namespace, record: Record) -> None:
    device, only = record.device, set(options.only)
    check_names("--only", options.only, all_ops())
    attach_here(device)
    found = calls_of_elementwise(device, only) | calls_of_decode(device, only) | calls_of_append(device, only)
    launches = {"launches": "on the device" if device.type == "cuda" else "nothing"}
    record.start(machine_facts(device) | launches)
    for name, kinds in (found | calls_of_autograd(device)).items():
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
        record.add({"name": name, "us": us, "must_us": HOST_MUST_US})
