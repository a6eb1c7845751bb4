"""Run the verifications of a run and hold their thresholds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from caramba.config.verify import CompareVerifyConfig, FidelityVerifyConfig, VerifyConfig
from caramba.data import TokenDataset
from caramba.errors import ConfigError, VerificationFailed
from caramba.model import Model
from caramba.result import Verdict
from caramba.verify.compare import compare
from caramba.verify.fidelity import fidelity

OpenWindows = Callable[[str, int], TokenDataset]


def check(
    configs: Sequence[VerifyConfig],
    teacher: Model,
    student: Model,
    windows: OpenWindows,
    *,
    run_id: str,
    device: torch.device,
) -> tuple[Verdict, ...]:
    """Run each verification in order. Thresholds are held by the caller, once every verdict is recorded.

    Args:
        windows: returns the windows of split `train` or `val` at a block size.

    Raises:
        ConfigError: a verification that is not built yet.
        VerificationFailed: a difference that is not a number.
    """
    verdicts = []
    for config in configs:
        if isinstance(config, CompareVerifyConfig):
            checks = compare(teacher, student, windows("val", config.block_size), config, device)
        elif isinstance(config, FidelityVerifyConfig):
            split = "val" if config.split == "auto" else config.split
            checks = fidelity(teacher, student, windows(split, config.block_size), config, device)
        else:
            raise ConfigError(f"verify: type={config.type!r} is not built yet; use compare or fidelity")
        for item in checks:
            if not math.isfinite(item.value):
                raise VerificationFailed(
                    f"verify {config.type} after {run_id}: {item.name} is {item.value}; the student diverged, lower lr"
                )
        verdicts.append(Verdict(config.type, run_id, checks, getattr(config, "fail_fast", False)))
    return tuple(verdicts)
