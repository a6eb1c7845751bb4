"""What optimisers share: which parameters decay, which are matrices of the stack, and the closure of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

Named = tuple[str, nn.Parameter]
OUTSIDE_THE_STACK = ("embedder", "head")


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies: not to norms, biases, gates and embeddings."""
    return parameter.ndim >= 2 and "embedder" not in name.split(".")


def is_stack_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix between features of the stack, which has singular values worth levelling:
    neither an embedding nor the head, whose rows stand for tokens."""
    return parameter.ndim == 2 and not set(name.split(".")) & set(OUTSIDE_THE_STACK)


def parameter_groups(named: Iterable[Named], weight_decay: float) -> list[dict[str, Any]]:
    """Return an optimiser's groups: parameters that decay, then those that do not; none of them empty."""
    pairs = list(named)
    groups = [
        {"params": [value for name, value in pairs if decays(name, value)], "weight_decay": weight_decay},
        {"params": [value for name, value in pairs if not decays(name, value)], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def call_closure(closure: Callable[[], Any] | None) -> Any:
    """Return what the closure of an optimiser's step returns, called with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()
