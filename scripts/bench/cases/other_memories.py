"""Memories of other packages, in the place of an attention layer: what they need, and the bytes of their state."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Shape:
    """Sizes that a memory has to fit: `max_bytes` of state for a sequence, in 32 bits."""

    d_model: int
    heads: int
    window: int
    max_bytes: int


class OtherMemory(nn.Module):
    """A mixer of another package. Shape: x [B, T, M] to the same; a context is refused, as it has none."""

    def __init__(self, mixer: nn.Module, state_bytes: int) -> None:
        super().__init__()
        self.mixer, self.state_bytes = mixer, state_bytes

    def mix(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, ctx: object = None) -> Tensor:
        if ctx is not None:
            raise ValueError(f"{type(self).__name__}: got a context; run whole rows")
        return self.mix(x)


class GatedSlots(OtherMemory):
    """Gated slot attention of flash-linear-attention, with as many slots as fit the bytes."""

    @classmethod
    def of(cls, shape: Shape) -> GatedSlots:
        from fla.layers.gsa import GatedSlotAttention

        per_slot = 2 * shape.d_model * 4
        slots = max(shape.max_bytes // per_slot, 1)
        layer = GatedSlotAttention(
            hidden_size=shape.d_model, num_heads=shape.heads, num_slots=slots, layer_idx=0
        )
        return cls(layer, slots * per_slot)

    def mix(self, x: Tensor) -> Tensor:
        return self.mixer(x)[0]


class Titans(OtherMemory):
    """Neural memory of titans-pytorch: its state is the weights that a text has changed, and their momentum."""

    @classmethod
    def of(cls, shape: Shape) -> Titans:
        from titans_pytorch import NeuralMemory

        def build(width: int) -> Titans:
            layer = NeuralMemory(
                dim=shape.d_model,
                dim_head=width,
                heads=shape.heads,
                chunk_size=shape.window,
                default_model_kwargs={"depth": 1},
            )
            for (
                parameter
            ) in layer.parameters():  # those of heads are views of one, which no optimiser can step
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            _, state = layer(torch.randn(1, 4 * shape.window, shape.d_model))
            held = (
                state.weights.values() if hasattr(state.weights, "values") else state.weights,
                state.states,
            )
            return cls(layer, count_bytes([list(held[0]), list(held[1] or ())]))

        return widest(build, shape)

    def mix(self, x: Tensor) -> Tensor:
        return self.mixer(x)[0]


class Infini(OtherMemory):
    """Infini-attention of infini-transformer-pytorch, segments as long as the window, whose tokens count."""

    segment = 1

    @classmethod
    def of(cls, shape: Shape) -> Infini:
        from infini_transformer_pytorch.infini_transformer import CausalAttention

        def build(width: int) -> Infini:
            layer = CausalAttention(shape.d_model, dim_head=width, heads=shape.heads)
            _, _, state = layer(torch.randn(1, shape.window, shape.d_model), return_new_memories=True)
            tokens = shape.window * shape.heads * width * 2 * 2
            memory = cls(layer, count_bytes(state) + tokens)
            memory.segment = shape.window
            return memory

        return widest(build, shape)

    def mix(self, x: Tensor) -> Tensor:
        memories, outputs = None, []
        for part in x.split(self.segment, dim=1):
            out, _, memories = self.mixer(part, past_memories=memories, return_new_memories=True)
            outputs.append(out)
        return torch.cat(outputs, dim=1)


def widest(build: Callable[[int], Any], shape: Shape) -> Any:
    """Return the memory of the widest heads whose state fits the bytes, else that of the narrowest."""
    for width in (128, 64, 32, 16, 8):
        found = build(width)
        if found.state_bytes <= shape.max_bytes:
            return found
    return found


def count_bytes(state: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(state) if isinstance(x, Tensor))


@dataclass(frozen=True)
class Package:
    """What a memory needs: a module to find, what to install, and a device, if it runs on no other."""

    module: str
    install: str
    build: Callable[[Shape], OtherMemory]
    device: str | None = None

    def missing(self, device: torch.device) -> str | None:
        """Return why the memory cannot run here, None if it can."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.install} is not installed: pip install {self.install}"
        if self.device not in (None, device.type):
            return f"{self.install} runs on {self.device}, not on {device.type}"
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            return f"{self.install} does not load: {error}"
        return None


OTHERS = {
    "gsa": Package("fla", "flash-linear-attention==0.6.0", GatedSlots.of, "cuda"),
    "titans": Package("titans_pytorch", "titans-pytorch==0.5.5", Titans.of),
    "infini": Package("infini_transformer_pytorch", "infini-transformer-pytorch==0.2.1", Infini.of),
}
