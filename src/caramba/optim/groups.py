"""Rules of which parameters decay, and which are matrices of the stack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
