"""Profilers of Lightning by name, which write their report below the run."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler

from caramba.runtime import is_main_process


def build_profiler(name: str | None, folder: Path) -> Profiler | None:
    """Return Lightning's profiler of a name, `simple`, `advanced` or `pytorch`, which writes to `folder`."""
    if name is None or not is_main_process():
        return None
    folder.mkdir(parents=True, exist_ok=True)
    if name == "simple":
        return SimpleProfiler(dirpath=folder, filename="simple")
    if name == "advanced":
        return AdvancedProfiler(dirpath=folder, filename="advanced")
    return PyTorchProfiler(dirpath=folder, filename="pytorch")
