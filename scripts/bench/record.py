"""The JSON file of a case: its name, the command that made it, the machine, then what the case measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from caramba.runs.files import write_json, write_whole


def machine_facts(device: torch.device | None = None) -> dict[str, Any]:
    """Return what figures depend on: device, versions and commit; without a device, platform and cores."""
    if device is None:
        facts: dict[str, Any] = {
            "platform": platform.platform(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
        }
        return facts | commit_here()
    facts = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        import triton

        facts = {"device": torch.cuda.get_device_name(), **facts, "triton": triton.__version__}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
        facts["cudnn"] = str(torch.backends.cudnn.version())
    else:
        facts = {"device": platform.machine(), **facts, "threads": torch.get_num_threads()}
    return facts | commit_here()


def commit_here() -> dict[str, str]:
    """Return the commit of the working tree; nothing outside a git repository."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {"commit": found.stdout.strip()} if found.returncode == 0 else {}


def is_same_machine(known: dict[str, Any], here: dict[str, Any]) -> bool:
    """True if figures of both may be compared: same device, torch and commit."""
    return all(known.get(key) == here.get(key) for key in ("device", "torch", "commit"))


DEFAULT_FOLDER = Path("docs/benchmarks")


class Record:
    """Writes the file of one case, whole at every call, so that an interrupted run keeps what it measured."""

    def __init__(self, name: str, out: Path | None, words: Sequence[str]) -> None:
        self.name = name
        self.out = None if out is None else out.absolute()
        self.made_by = " ".join(["python scripts/bench/run.py", *words])

    def head(self, machine: dict[str, Any]) -> dict[str, Any]:
        """Return the keys that every file begins with."""
        return {"benchmark": self.name, "made_by": self.made_by, "machine": machine}

    def write(self, machine: dict[str, Any], /, **measured: Any) -> None:
        """Write the head and what was measured, if there is a file to write."""
        if self.out is not None:
            write_json(self.out, {**self.head(machine), **measured})

    def write_data(self, data: dict[str, Any]) -> None:
        """Write data that begins with `head`."""
        if self.out is not None:
            write_json(self.out, data)

    def write_plot(self, image: bytes) -> str | None:
        """Write a PNG next to the file and return its name."""
        if self.out is None:
            return None
        file = self.out.with_suffix(".png")
        write_whole(file, image)
        return file.name

    def default(self, name: str) -> None:
        """Write to docs/benchmarks/NAME if no --out was given: for cases whose file depends on an option."""
        self.out = self.out or (DEFAULT_FOLDER / name).absolute()

    def read(self) -> dict[str, Any]:
        """Return the file of an earlier call, empty if there is none."""
        return json.loads(self.out.read_text()) if self.out is not None and self.out.is_file() else {}
