"""Norms of gradients by layer and of the whole update, taken around an optimiser's step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from caramba.optim.clip import tensor_norms
from caramba.optim.master_weights import clipping_step
from caramba.optim.shards import complete_squares, is_sharded, local
from caramba.runtime import all_agree, gather_objects

LAYER_GRAD_NORM, UPDATE_NORM = "layer_grad_norm", "update_norm"
_LAYER = re.compile(r"(.*\.\d+)\.")


class StepNorms:
    """Measures the steps that `is_due` names, through hooks on the optimiser.

    update_norm = |theta_after - theta_before|_2 over everything that trains, and layer_grad_norm/LAYER the 2-norm of
    the gradient that the step uses (after clipping) of every layer that holds a matrix. Values stay on the device
    until `read`. The update needs a copy of what trains; where `has_room` denies it the update goes unmeasured.

    Args:
        named: names and tensors of what trains, as the model names them.
        is_due: whether the step that is being taken is measured.
        has_room: whether that many bytes may be taken for the time of the step.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        *,
        is_due: Callable[[], bool],
        has_room: Callable[[int], bool],
    ) -> None:
        self._parameters = dict(named)
        self._is_due, self._has_room = is_due, has_room
        self._layers = layers_of(self._parameters)
        self._is_sharded = any(is_sharded(p) for p in self._parameters.values())
        self._size = sum(local(p).numel() * p.element_size() for p in self._parameters.values())
        self._before: list[Tensor] | None = None
        self._measured: dict[str, Tensor] = {}
        self._hooks: list[Any] = []

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch the steps of an optimiser."""
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._begin(optimizer)),
            optimizer.register_step_post_hook(lambda *_: self._end()),
        ]

    def detach(self) -> None:
        """Leave the optimiser as it was."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._before = [], None

    def read(self) -> dict[str, float]:
        """Return what the last measured step measured, once."""
        measured, self._measured = self._measured, {}
        if not measured:
            return {}
        values = torch.stack(list(measured.values())).tolist()  # one transfer for all
        return dict(zip(measured, values, strict=True))

    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        self._before = None
        if not self._is_due():
            return
        self._measured = self._layer_norms()
        step = clipping_step(optimizer)
        if step is not None and step.clip is not None:  # by which the step multiplies what it reads
            self._measured = {name: norm * step.clip for name, norm in self._measured.items()}
        has_room = self._has_room(self._size)
        if self._is_sharded:  # a norm of parts is taken by all ranks or none
            has_room = all_agree(has_room, next(iter(self._parameters.values())).device)
        if has_room:
            self._before = [local(p.detach()).clone() for p in self._parameters.values()]

    @torch.no_grad()
    def _end(self) -> None:
        before, self._before = self._before, None
        if before:
            after = list(self._parameters.values())
            torch._foreach_sub_(before, [local(p) for p in after])  # pyright: ignore[reportPrivateImportUsage]
            squares = complete_squares(tensor_norms(before).square(), after)
            self._measured[UPDATE_NORM] = squares.sum().sqrt()

    def _layer_norms(self) -> dict[str, Tensor]:
        names = [(layer, name) for layer, names in self._layers.items() for name in names]
        held = [(layer, self._parameters[name].grad) for layer, name in names]
        gradients = [(layer, grad) for layer, grad in held if grad is not None]
        if not gradients:
            return {}
        norms = tensor_norms([grad for _, grad in gradients]).unbind()
        by_layer: dict[str, list[Tensor]] = {}
        for (layer, _), norm in zip(gradients, norms, strict=True):
            by_layer.setdefault(layer, []).append(norm)
        return {
            f"{LAYER_GRAD_NORM}/{layer}": torch.linalg.vector_norm(torch.stack(own))
            for layer, own in by_layer.items()
        }


def norms_of_stages(own: dict[str, float]) -> dict[str, float]:
    """Return a step's norms from those of pipeline ranks. Collective: all ranks call it, or none."""
    parts = gather_objects(own)
    joined = {name: value for part in parts for name, value in part.items() if name != UPDATE_NORM}
    if all(UPDATE_NORM in part for part in parts):  # which is not measured where there is no room for a copy
        joined[UPDATE_NORM] = math.hypot(*(part[UPDATE_NORM] for part in parts))
    return joined


def layers_of(parameters: dict[str, nn.Parameter]) -> dict[str, list[str]]:
    """Return the parameters of every layer that holds a matrix: a node of the topology, the embedder or the head."""
    found: dict[str, list[str]] = {}
    for name in parameters:
        match = _LAYER.match(name)
        layer = match.group(1).removeprefix("topology.") if match else name.split(".")[0]
        found.setdefault(layer, []).append(name)
    return {
        layer: names for layer, names in found.items() if any(parameters[name].ndim > 1 for name in names)
    }
