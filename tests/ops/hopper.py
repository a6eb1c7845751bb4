"""Triton as on a Hopper GPU that is not there: kernels are compiled as they are launched, and nothing runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

PROCESSORS = 132
SHARED_BYTES = 227 * 1024
"""Shared memory that a program can have: a kernel that needs more compiles, and fails when it is launched."""
DEVICE = -90
"""A number that no device has: Triton keeps compiled kernels by it."""


class Driver:
    """What Triton asks a driver for until it has compiled a kernel."""

    def __init__(self) -> None:
        self.target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0


def module(name: str) -> ModuleType:
    return importlib.import_module(f"caramba.kernels.triton.{name}")


@contextmanager
def hopper() -> Iterator[list[tuple[str, Any]]]:
    """Compile what is launched for sm_90, out of the arguments it is launched with.

    Yields the names of the kernels with what each became, in order. Launchers get no compiled kernel back, as in
    Triton's interpreter, and therefore ask for it anew each time.
    """
    jit = importlib.import_module("triton.runtime.jit").JITFunction
    config = importlib.import_module("triton.runtime").driver
    run, made = jit.run, []

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made.append((self.fn.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "_active", Driver())
        patch.setattr(jit, "run", compile_only)
        # Of tensors on the CPU launchers would otherwise choose as for the interpreter.
        patch.setattr(module("norm"), "_counts", {torch.device("cpu"): PROCESSORS})
        patch.setattr(module("dba_decode"), "num_sms", lambda device: PROCESSORS)
        patch.setattr(module("decoupled_attention_tiles"), "shared_bytes", lambda device: SHARED_BYTES)
        for name in ("dba_decode", "pdl", "norm_dropout_activation"):
            patch.setattr(module(name), "arch", lambda device: "sm90")
        patch.setattr(module("dba_decode"), "plans", module("signature").LaunchCache())
        yield made
