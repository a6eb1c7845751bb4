"""Kernels that are launched while the one ahead of them ends (programmatic dependent launch): where, and how."""

from __future__ import annotations

import torch
from caramba.kernels.triton.launch import INTERPRETED, arch

EARLY_ARCHS = "sm90", "sm100", "sm103", "sm120"
"""Devices that have it."""


def supports_pdl(device: torch.device) -> bool:
    """Whether kernels whose first instruction waits for the kernel ahead are launched before that one has ended.

    What is between two kernels then costs less: a step of one sequence, whose kernels are short, takes 5% less on an
    H200. To ask for weights ahead of the wait, or to let the next kernel begin before this one ends, took longer.
    """
    # AMD names devices by the same numbers.
    return not INTERPRETED and torch.version.hip is None and arch(device) in EARLY_ARCHS


def pdl_options(early: bool) -> dict[str, int]:
    """Return the options of a kernel that may begin while the one ahead ends."""
    return {"launch_pdl": True} if early else {}
