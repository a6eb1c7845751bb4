"""What figures of a bench depend on: device, driver, versions and commit."""

from __future__ import annotations

import platform
import subprocess
from typing import Any

import torch


def machine(device: torch.device) -> dict[str, Any]:
    """Return what the times depend on."""
    facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
    if device.type == "cuda":
        import triton

        facts = {"device": torch.cuda.get_device_name(), **facts, "triton": triton.__version__}
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0]
    else:
        facts = {"device": platform.machine(), **facts}
    return facts | commit_here()


def commit_here() -> dict[str, str]:
    """Return the commit of the working tree; nothing where git knows none, as in a copy of it."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {"commit": found.stdout.strip()} if found.returncode == 0 else {}


def is_same_machine(known: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether figures of the one may stand beside those of the other: of the same device, torch and commit."""
    return all(known.get(key) == here.get(key) for key in ("device", "torch", "commit"))
