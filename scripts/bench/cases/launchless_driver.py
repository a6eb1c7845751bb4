"""A Triton driver that compiles for sm_90 and launches nothing, to time the host's side on a machine without a GPU."""

from __future__ import annotations

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.runtime import driver


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
