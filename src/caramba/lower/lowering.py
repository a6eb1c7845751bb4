"""Lowering: one pass over a built model that installs everything that only exists for speed."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple

import torch
from torch import nn

from caramba.kernels import uses_reference
from caramba.lower.absorb_latent import absorb_latent
from caramba.lower.cpu_decode import cpu_decode
from caramba.lower.decode_attention import lower_decode_attention
from caramba.lower.float8_swiglu import fuse_float8_swiglu
from caramba.lower.fuse_linears import fuse_linears
from caramba.lower.fuse_training import fuse_training
from caramba.lower.latent_keys import fuse_latent_keys
from caramba.lower.latent_queries import fuse_latent_queries
from caramba.lower.norm_linear import fuse_norm_linear
from caramba.lower.prefix_attention import fuse_prefix_attention
from caramba.lower.replaced import Replaced, refuse_hooks
from caramba.lower.small_batch_head import small_batch_head
from caramba.lower.split_keys import split_keys

Mode = Literal["train", "prefill", "decode"]


class Pass(NamedTuple):
    """A rewrite of a model: returns the modules that it replaced."""

    name: str
    modes: tuple[Mode, ...]
    apply: Callable[..., list[Replaced]]


PASSES = (
    Pass("float8_swiglu", ("train",), fuse_float8_swiglu),
    Pass("fuse_training", ("train",), fuse_training),
    Pass("fuse_linears", ("decode",), fuse_linears),
    Pass("latent_keys", ("train",), fuse_latent_keys),
    Pass("latent_queries", ("train", "decode"), fuse_latent_queries),
    Pass("prefix_attention", ("train",), fuse_prefix_attention),
    Pass("split_keys", ("train", "prefill", "decode"), split_keys),
    Pass("absorb_latent", ("decode",), absorb_latent),
    Pass("decode_attention", ("prefill", "decode"), lower_decode_attention),
    Pass("norm_linear", ("decode",), fuse_norm_linear),
    Pass("small_batch_head", ("decode",), small_batch_head),
    Pass("cpu_decode", ("decode",), cpu_decode),
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
        for one in PASSES:
            if mode in one.modes:
                found = one.apply(model, is_compiled=is_compiled)
                lowered._replaced += found
                lowered.replaced[one.name] = len(found)
        lowered._allow_hooks = refuse_hooks(lowered._replaced)
    except BaseException:
        lowered.restore()
        raise
    return lowered
