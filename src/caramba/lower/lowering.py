"""Lowering: one pass over a built model that installs everything that only exists for speed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple

import torch
from torch import nn

from caramba.kernels import uses_reference
from caramba.lower.replaced import Replaced, refuse_hooks

Mode = Literal["train", "prefill", "decode"]


class Pass(NamedTuple):
    """A rewrite of a model.

    Attributes:
        layer: name of a class; a model without a module of it is passed over. Empty for every model.
        apply: returns the modules that it replaced.
    """

    name: str
    modes: tuple[Mode, ...]
    layer: str
    apply: Callable[..., list[Replaced]]


def _of(module: str, function: str) -> Callable[..., list[Replaced]]:
    """Return a function of a module of this package that is imported at the first call."""

    def apply(model: nn.Module, *, is_compiled: bool) -> list[Replaced]:
        return getattr(importlib.import_module(f"caramba.lower.{module}"), function)(
            model, is_compiled=is_compiled
        )

    return apply


PASSES = (
    Pass("float8_swiglu", ("train",), "Float8Linear", _of("float8_swiglu", "fuse_float8_swiglu")),
    Pass("fuse_training", ("train",), "", _of("fuse_training", "fuse_training")),
    Pass("fuse_linears", ("decode",), "", _of("fuse_linears", "fuse_linears")),
    Pass("latent_keys", ("train",), "LatentProjection", _of("latent_keys", "fuse_latent_keys")),
    Pass(
        "latent_queries",
        ("train", "decode"),
        "LatentProjection",
        _of("latent_queries", "fuse_latent_queries"),
    ),
    Pass("prefix_attention", ("train",), "FirstTokens", _of("prefix_attention", "fuse_prefix_attention")),
    Pass("split_keys", ("train", "prefill", "decode"), "LatentProjection", _of("split_keys", "split_keys")),
    Pass("absorb_latent", ("decode",), "LatentProjection", _of("absorb_latent", "absorb_latent")),
    Pass("decode_attention", ("prefill", "decode"), "", _of("decode_attention", "lower_decode_attention")),
    Pass("norm_linear", ("decode",), "", _of("norm_linear", "fuse_norm_linear")),
    Pass("small_batch_head", ("decode",), "", _of("small_batch_head", "small_batch_head")),
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


def lower(
    model: nn.Module, device: torch.device | str, mode: Mode, *, is_compiled: bool = False
) -> LoweredModel:
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
                found = one.apply(model, is_compiled=is_compiled) if one.layer in layers else []
                lowered._replaced += found
                lowered.replaced[one.name] = len(found)
        lowered._allow_hooks = refuse_hooks(lowered._replaced)
    except BaseException:
        lowered.restore()
        raise
    return lowered
