"""A call of an op's launcher, for tests of what it launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A call of an op's launcher, and the kernels that it launches, in order."""

    op: str
    name: str
    kernels: tuple[str, ...]
    arguments: Callable[[], tuple[Any, ...]]

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"


def one(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype)
