"""Ranges of what linear layers read, taken channel by channel while a model reads text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from caramba.config.benchmark import CalibrationConfig
from caramba.errors import DataError
from caramba.layer import LinearLayer
from caramba.model import Model

HEAD = "head"
"""Name under which a model has its head."""


@dataclass(frozen=True)
class Ranges:
    """The range of each input channel of each layer, fp32 [d_in] by qualified name, and the tokens they come from."""

    of: Mapping[str, Tensor]
    tokens: int
    config: CalibrationConfig


class LargestMagnitudes:
    """The k largest magnitudes of every channel so far: their smallest is an exact percentile, the first the maximum.

    Of n values the percentile p is the ceil((1 - p / 100) n)-th largest, at least the first.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self.largest: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        """Update with activations. Shape: [..., d_in]."""
        found = x.detach().flatten(0, -2).abs().float()
        every = found if self.largest is None else torch.cat((self.largest, found))
        self.largest = every.topk(min(self.k, len(every)), dim=0).values

    def range(self) -> Tensor:
        """Return the k-th largest magnitude of each channel. Shape: [d_in]."""
        assert self.largest is not None
        return self.largest[-1]


@torch.inference_mode()
def observe_ranges(
    model: Model, layers: Mapping[str, nn.Module], windows: Sequence[Tensor], config: CalibrationConfig
) -> Ranges:
    """Run windows of token ids [T] through a model in eval mode and return the ranges of what layers read.

    Raises:
        DataError: no text.
    """
    n_tokens = sum(len(window) for window in windows)
    if not n_tokens:
        raise DataError("calibration: no text to take ranges from; name a text of at least one token")
    share = 0.0 if config.method == "max" else 1 - config.percentile / 100
    # Rounded first: 1 - 99.9 / 100 is a hair above 0.001.
    seen = {name: LargestMagnitudes(max(1, math.ceil(round(share * n_tokens, 6)))) for name in layers}

    def watch(name: str) -> None:
        def hook(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            seen[name].observe(layer.reduce(given[0]) if isinstance(layer, LinearLayer) else given[0])

        # By the class: every pass of prefill calls the linear layers, though it refuses new hooks on them.
        hooks.append(nn.Module.register_forward_pre_hook(layers[name], hook))

    hooks: list[torch.utils.hooks.RemovableHandle] = []
    was_training, device = model.training, model.embedder.token.weight.device
    model.eval()
    try:
        for name in layers:
            if name != HEAD:
                watch(name)
        for window in windows:
            hidden = model.hidden(window.to(device)[None])
            if HEAD in seen:  # what it reads is at hand: its product with the whole vocabulary is not needed
                seen[HEAD].observe(hidden)
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    return Ranges({name: each.range() for name, each in seen.items()}, n_tokens, config)
