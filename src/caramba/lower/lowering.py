"""Lowering: one pass over a built model that installs everything that only exists for speed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import torch
from torch import nn

from caramba.errors import ConfigError
from caramba.kernels import uses_reference

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
        if isinstance(module, kind) and not isinstance(module, fast) and not has_hooks(module) and matches(module)
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


Mode = Literal["train", "prefill", "decode"]


class Pass(NamedTuple):
    """A rewrite of a model.

    Attributes:
        layer: name of a class; a model without a module of it is passed over. Empty for every model.
        is_for_compiled: whether a model whose forwards are not compiled is passed over.
        apply: returns the modules that it replaced.
    """

    name: str
    modes: tuple[Mode, ...]
    layer: str
    apply: Callable[..., list[Replaced]]
    is_for_compiled: bool = False


def _of(module: str, function: str) -> Callable[..., list[Replaced]]:
    """Return a function of a module of this package that is imported at the first call."""

    def apply(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
        return getattr(importlib.import_module(f"caramba.lower.{module}"), function)(model, is_compiled=is_compiled)

    return apply


PASSES = (
    Pass("float8_swiglu", ("train",), "Float8Linear", _of("float8_swiglu", "fuse_float8_swiglu")),
    Pass("fuse_training", ("train",), "", _of("fuse_training", "fuse_training"), is_for_compiled=True),
    Pass("fuse_linears", ("decode",), "", _of("fuse_linears", "fuse_linears")),
    Pass("latent_keys", ("train",), "LatentProjection", _of("absorb_latent", "fuse_latent_keys")),
    Pass("latent_queries", ("train", "decode"), "LatentProjection", _of("absorb_latent", "fuse_latent_queries")),
    Pass("first_tokens", ("train",), "FirstTokens", _of("first_tokens", "fuse_first_tokens")),
    Pass("prefix_attention", ("train",), "FirstTokens", _of("prefix_attention", "fuse_prefix_attention")),
    Pass("split_keys", ("train", "prefill", "decode"), "LatentProjection", _of("split_keys", "split_keys")),
    Pass("absorb_latent", ("decode",), "LatentProjection", _of("absorb_latent", "absorb_latent")),
    Pass("decode_attention", ("prefill", "decode"), "", _of("decode_attention", "lower_decode_attention")),
    Pass("norm_linear", ("decode",), "", _of("norm_linear", "fuse_norm_linear")),
    Pass("small_batch_head", ("decode",), "", _of("norm_linear", "small_batch_head")),
    Pass("cpu_decode", ("decode",), "", _of("cpu_decode", "cpu_decode")),
)
"""In the order in which they run: later ones build on earlier ones."""


class LoweredModel:
    """A model with fast paths, until `restore` or the end of a `with` block.

    Attributes:
        replaced: number of modules that each pass replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.replaced: dict[str, int] = {}
        self._replaced: list[Replaced] = []
        self._allow_hooks: Callable[[], None] | None = None

    def restore(self) -> None:
        """Give the plain model back. Calling it again changes nothing."""
        if self._allow_hooks is not None:
            self._allow_hooks()
            self._allow_hooks = None
        while self._replaced:
            self._replaced.pop().restore()

    def __enter__(self) -> LoweredModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def lower(model: nn.Module, device: torch.device | str, mode: Mode, *, is_compiled: bool = False) -> LoweredModel:
    """Install the fast paths of a mode on a device; parameters and their names stay, and no weight is copied.

    What has hooks, a forward of its own, an adapter, or a quantised or sharded weight that a pass does not support runs
    as it is. While the model is lowered no weight or layer may be replaced: restore it first. A new forward hook
    inside of what is lowered raises. Under `kernels: reference` nothing is lowered.
    """
    lowered = LoweredModel(model)
    if uses_reference(device):
        return lowered
    try:
        layers = {"", *(kind.__name__ for module in model.modules() for kind in type(module).__mro__)}
        for one in PASSES:
            if mode in one.modes:
                applies = one.layer in layers and (is_compiled or not one.is_for_compiled)
                found = one.apply(model, is_compiled=is_compiled) if applies else []
                lowered._replaced += found
                lowered.replaced[one.name] = len(found)
        lowered._allow_hooks = refuse_hooks(lowered._replaced)
    except BaseException:
        lowered.restore()
        raise
    return lowered
