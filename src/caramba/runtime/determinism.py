"""The same numbers again: algorithms that give the same bits, and random states that follow from the seed alone."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from caramba.errors import ConfigError

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
# The sizes for which cuBLAS documents that its results repeat.
_REPEATABLE = (":4096:8", ":16:8")


def apply_determinism(is_deterministic: bool) -> None:
    """Allow only deterministic algorithms in this process, or any: an earlier run of the process may have set either.

    An operation without one raises instead of giving other bits in silence. cuBLAS reads its workspace setting when
    it is first used, so this comes before anything touches a GPU.

    Raises:
        ConfigError: the environment sets a cuBLAS workspace whose results do not repeat.
    """
    if is_deterministic:
        found = os.environ.setdefault(CUBLAS, _REPEATABLE[0])
        if found not in _REPEATABLE:
            raise ConfigError(
                f"deterministic=true: {CUBLAS}={found} in the environment does not repeat; unset it, or set it to "
                f"{' or '.join(_REPEATABLE)}"
            )
        torch.backends.cudnn.benchmark = False
    if torch.are_deterministic_algorithms_enabled() != is_deterministic:  # the call imports the compiler
        torch.use_deterministic_algorithms(is_deterministic)


def seed_process(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch on every device: rank 0 with `seed`, others with a seed derived from it.

    Ranks share the data and the weights by other means; what they draw here (dropout) must differ. Workers of a data
    loader are seeded by torch from this state, each with another number.
    """
    own = seed if rank == 0 else int(np.random.SeedSequence([seed, rank]).generate_state(1, np.uint32)[0])
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)


def random_states(device: torch.device) -> dict[str, Any]:
    """Return torch's random state on the host, and on `device` where that is a GPU: other GPUs are other ranks'."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `random_states` returned, on any machine; states of older runs list one for every GPU."""
    torch.set_rng_state(states["cpu"])
    if "cuda" not in states or device.type != "cuda":
        return
    saved = states["cuda"]
    if isinstance(saved, list | tuple):
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= len(saved):
            return  # none was saved for this GPU: it keeps its own
        saved = saved[index]
    torch.cuda.set_rng_state(saved, device)
