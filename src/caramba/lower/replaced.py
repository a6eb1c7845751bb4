"""What a pass replaced, and the refusal of hooks where a fast path would pass them by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

from torch import nn

from caramba.errors import ConfigError

REGISTRATIONS = ("register_forward_hook", "register_forward_pre_hook")


class Replaced(NamedTuple):
    """A module that a pass replaced, and what restores it."""

    module: nn.Module
    restore: Callable[[], None]


def refuse_hooks(replaced: Iterable[Replaced]) -> Callable[[], None]:
    """Let modules inside replaced ones raise at a new forward hook; return what ends that.

    A replaced module runs its own hooks still, but may compute what its parts would without calling them.
    """
    outer = [one.module for one in replaced]
    inner = {part for module in outer for part in module.modules() if part is not module}
    guarded = [part for part in inner if REGISTRATIONS[0] not in part.__dict__]
    for part in guarded:
        for name in REGISTRATIONS:
            part.__dict__[name] = _refuse

    def end() -> None:
        for part in guarded:
            for name in REGISTRATIONS:
                part.__dict__.pop(name, None)

    return end


def _refuse(*given: Any, **options: Any) -> NoReturn:
    raise ConfigError(
        "lower: got a forward hook on a part of a lowered model, which may run without calling it; register hooks "
        "before generation begins, or use kernels: reference"
    )
