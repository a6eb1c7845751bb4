"""Pipeline stages: every rank keeps its share of the stack's blocks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from caramba.config.model import ModelSpec
from caramba.config.parallel_check import pipeline_problem, stack_of
from caramba.errors import ConfigError
from caramba.model import Model
from caramba.model.topology import NestedTopology, Topology

TIED = "embedder.token.weight"


class PassThrough(nn.Module):
    """Identity placeholder for another stage's node; keeps state-dict names."""

    def forward(self, x: Tensor, ctx: Any = None) -> Tensor:
        return x


class Stage(nn.Module):
    """One pipeline stage of a model that `split_stage` reduced to this stage's layers.

    Shape: tokens [B, T] int64 on the first stage, else features [B, T, M], to features [B, T, M] in the weights' dtype.
    """

    def __init__(self, model: Model, index: int, n_stages: int) -> None:
        super().__init__()
        self.model, self.index, self.n_stages = model, index, n_stages

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.n_stages - 1

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the features sent between stages."""
        return next(self.model.parameters()).dtype

    @property
    def tied(self) -> Tensor | None:
        """The embedding weight shared with a tied head, on the first and the last stage."""
        is_tied = self.model.spec.head.tied and (self.is_first or self.is_last)
        return self.model.embedder.token.weight if is_tied else None

    @torch.no_grad()
    def join_gradients(self) -> None:
        """Sum the tied weight's gradients of the first and last stage, bitwise equal on both."""
        if self.tied is None:
            return
        gradient = self.tied.grad
        assert gradient is not None
        if self.is_last:
            dist.send(gradient.contiguous(), dst=0)
            dist.recv(gradient, src=0)
            return
        other = torch.empty_like(gradient)
        dist.recv(other, src=self.n_stages - 1)
        gradient += other
        dist.send(gradient, dst=self.n_stages - 1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.model.embedder(x) if self.is_first else x
        return self.model.topology(features).to(self.dtype)


def split_stage(model: Model, index: int, n_stages: int) -> Stage:
    """Reduce a model in place to the layers of stage `index` of `n_stages`; names do not change.

    The first stage has the embedder and the layers before the stack; the last one has the layers after it, the head
    and, for a tied head, a copy of the embedding.

    Raises:
        ConfigError: the topology is no uniform stack, or its blocks do not divide.
    """
    problem = pipeline_problem(model.spec, n_stages)
    if problem is not None:
        raise ConfigError(problem)
    stage = Stage(model, index, n_stages)
    assert isinstance(model.topology, Topology)
    for name, place, layers in _lists(model):
        if stage_of(f"{name}.{place}.", model.spec, n_stages) != index:
            layers[place] = PassThrough()
    if not stage.is_first:
        model.embedder.position = None
        if stage.tied is None:
            model.embedder.token.register_parameter("weight", None)
    if not stage.is_last:
        model.add_module("head", PassThrough())
    return stage


def _lists(model: Model) -> list[tuple[str, int, nn.ModuleList]]:
    """Return (name of the list, index, list) of the nodes that are assigned to stages."""
    found: list[tuple[str, int, nn.ModuleList]] = []
    assert isinstance(model.topology, Topology)
    for place, node in enumerate(model.topology.layers):
        if isinstance(node, NestedTopology):
            name = f"topology.layers.{place}.layers"
            found += [(name, inner, node.layers) for inner in range(len(node.layers))]
        else:
            found.append(("topology.layers", place, model.topology.layers))
    return found


def stage_of(name: str, spec: ModelSpec, n_stages: int) -> int:
    """Return the stage of a weight, by its name in the whole model."""
    found = stack_of(spec)
    assert found is not None
    at, stack = found
    words = name.split(".")
    if words[0] == "embedder":
        return 0
    if words[0] == "head":
        return n_stages - 1
    place = int(words[2])  # topology.layers.PLACE[.layers.NODE]
    if place != at:
        return 0 if place < at else n_stages - 1
    return int(words[4]) // (len(stack.layers) * (stack.repeat // n_stages))


@torch.no_grad()
def send_stages(whole: Model | None, stage: Stage, device: torch.device) -> None:
    """Allocate a stage that is on meta, and send it its weights of rank 0's `whole` model."""
    stage.model.to_empty(device=device)
    own = stage.model.state_dict()
    if whole is None:
        for value in own.values():
            dist.recv(value, src=0)
        return
    for name, value in whole.state_dict().items():
        there = stage_of(name, whole.spec, stage.n_stages)
        if there == 0:
            own[name].copy_(value)
        if there > 0 or (whole.spec.head.tied and name == TIED):
            dist.send(value.to(device).contiguous(), dst=there or stage.n_stages - 1)


@torch.no_grad()
def gather_stages(stage: Stage, whole: Model | None) -> None:
    """Copy the weights of all stages into rank 0's `whole` model."""
    own = stage.model.state_dict()
    if whole is None:
        for name, value in own.items():
            if stage_of(name, stage.model.spec, stage.n_stages) == stage.index:
                dist.send(value.contiguous(), dst=0)
        return
    device = next(stage.model.parameters()).device
    for name, value in whole.state_dict().items():
        there = stage_of(name, whole.spec, stage.n_stages)
        if there == 0:
            value.copy_(own[name])
        else:
            found = torch.empty_like(value, device=device)
            dist.recv(found, src=there)
            value.copy_(found)
