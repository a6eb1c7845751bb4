"""The JSON file of a case: its name, the command that made it, the machine, then what the case measured."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from caramba.runs.files import write_json, write_whole
from caramba.runtime import release_memory


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
Row = dict[str, Any]


class Record:
    """The file of one case, written whole after every row, so that an interrupted run keeps what it measured.

    Attributes:
        device: what the case runs on.
        data: what the file holds: the name, the command, the machine, then what the case adds.
    """

    def __init__(self, name: str, out: Path | None, words: Sequence[str], device: torch.device) -> None:
        self.name, self.device, self.began = name, device, time.monotonic()
        self.out = None if out is None else out.absolute()
        self.made_by = " ".join(["python scripts/bench/run.py", *words])
        self.data: dict[str, Any] = {}

    def start(
        self,
        machine: Row | None = None,
        *,
        resume: tuple[str, ...] = (),
        before: str | None = None,
        **head: Any,
    ) -> None:
        """Begin the file by its head; lists named by `resume` continue those of an earlier file with the same head.

        That file is `before`, or the one to be written. What another device, commit or torch measured is left out.
        """
        machine = machine_facts(self.device) if machine is None else machine
        self.data = {"benchmark": self.name, "made_by": self.made_by, "machine": machine, **head}
        earlier = json.loads(Path(before).read_text()) if before else self.read()
        is_same = is_same_machine(earlier.get("machine", {}), machine) and all(
            earlier.get(key) == value for key, value in json.loads(json.dumps(head)).items()
        )
        for key in resume:
            self.data[key] = earlier.get(key, []) if is_same else []

    def add(self, row: Row, key: str = "rows") -> None:
        """Add a row, print it and write the file."""
        self.data.setdefault(key, []).append(row)
        print(shown(row), flush=True)
        self.save()

    def save(self, **more: Any) -> None:
        """Add keys to the file and write it, if there is one."""
        self.data |= more
        if self.out is not None:
            write_json(self.out, self.data)

    def measure(
        self, cases: Iterable[tuple[str, Callable[[], Iterable[Row]]]], seconds: float, key: str = "rows"
    ) -> None:
        """Add the rows of each named case that the file lacks, while there is time and memory.

        A case is there whole or not at all; `left_out` lists those that are not, with the reason.
        """
        left_out = self.data.setdefault("left_out", [])
        known = {row.get("case") for row in self.data.setdefault(key, [])}
        for name, measure in cases:
            if name in known:
                continue
            if time.monotonic() - self.began > seconds:
                left_out.append(f"{name}: no time left")
                continue
            try:
                for row in list(measure()):
                    self.add({"case": name} | row, key)
            except torch.OutOfMemoryError as error:
                left_out.append(f"{name}: {str(error).splitlines()[0]}")
            release_memory()
        self.save()
        print(f"{len(left_out)} cases left out", flush=True)

    def write_plot(self, image: bytes | None) -> str | None:
        """Write a PNG next to the file and return its name."""
        if self.out is None or image is None:
            return None
        file = self.out.with_suffix(".png")
        write_whole(file, image)
        return file.name

    def read(self) -> dict[str, Any]:
        """Return the file of an earlier call, empty if there is none."""
        return json.loads(self.out.read_text()) if self.out is not None and self.out.is_file() else {}


def shown(value: Any) -> str:
    """Return a row as one line, without its long lists."""
    if isinstance(value, dict):
        parts = (f"{key} {shown(item)}" for key, item in value.items())
        return ", ".join(part for part in parts if not part.endswith(" ..."))
    if isinstance(value, list | tuple):
        return "..." if len(value) > 4 else "[" + " ".join(map(shown, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
