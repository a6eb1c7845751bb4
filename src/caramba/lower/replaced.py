"""How passes match modules, replace their classes, and refuse hooks that a fast path would pass by."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn, TypeVar

from torch import nn

from caramba.errors import ConfigError

REGISTRATIONS = ("register_forward_hook", "register_forward_pre_hook")
PLAIN = "plain_class"
M = TypeVar("M", bound=nn.Module)


class Replaced(NamedTuple):
    """A module that a pass replaced, and what restores it."""

    module: nn.Module
    restore: Callable[[], None]


def has_hooks(module: nn.Module) -> bool:
    """True if the module has forward hooks or an instance-level `forward`. Only passes ask."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return a module's class before lowering."""
    kind = type(module)
    while PLAIN in vars(kind):
        kind = vars(kind)[PLAIN]
    return kind


def is_unmodified(module: nn.Module, kind: type[nn.Module]) -> bool:
    """True if a module is of exactly this class, lowered or not, without hooks or a forward of its own.

    Adapters, quantisation and tensor parallelism change the class.
    """
    return plain_class(module) is kind and not has_hooks(module)


def replace_class(module: nn.Module, fast: type[nn.Module], **fields: Any) -> Replaced:
    """Put a fast class before a module's own, with `fields` as attributes; parameters and names stay.

    The fast class falls back to the module's own by `super()`, so several passes may replace one module.
    """
    before = type(module)
    module.__class__ = _derived(fast, before)
    module.__dict__.update(fields)

    def restore() -> None:
        module.__class__ = before
        for name in fields:
            del module.__dict__[name]

    return Replaced(module, restore)


def replace_each(
    model: nn.Module, kind: type[M], fast: type[nn.Module], matches: Callable[[M], bool]
) -> list[Replaced]:
    """Replace the class of every module of a kind that `matches`, unless it has hooks or is replaced already."""
    return [
        replace_class(module, fast)
        for module in model.modules()
        if isinstance(module, kind)
        and not isinstance(module, fast)
        and not has_hooks(module)
        and matches(module)
    ]


@functools.cache  # one class for all modules, so that compiled code is shared
def _derived(fast: type[nn.Module], before: type[nn.Module]) -> type[nn.Module]:
    return type(fast.__name__, (fast, before), {PLAIN: before})


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
