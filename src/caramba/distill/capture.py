"""Capture inputs and outputs of attention layers, without running the model past the last of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from caramba.cache import Context
from caramba.layer import AttentionLayer, Documents
from caramba.model import Model
from caramba.model.topology import attention_applications

Named = tuple[str, AttentionLayer]
OnCall = Callable[[str, Tensor, Tensor], object]
Replacement = Callable[[str, AttentionLayer, Tensor], Tensor]


class _Reached(Exception):  # noqa: N818 - not an error: it ends a forward early
    """The last captured call has been made."""


@torch.no_grad()
def capture_attention_io(
    model: Model, layers: Sequence[Named], tokens: Tensor, on_call: OnCall, documents: Tensor | None = None
) -> None:
    """Run the model on tokens [B, T] and call on_call(name, input, output), both [B, T, M], after each given layer.

    Nothing runs after the last of the calls: no feed-forward layer, norm or head. A layer that runs several times
    (shared weights) calls once for each application. `documents` [B, T] are document ids, as in `Model`.
    """
    left = _calls(model, layers)

    def hook_of(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            nonlocal left
            left -= 1
            on_call(name, inputs[0], output)
            if left == 0:
                raise _Reached

        return hook

    with ExitStack() as stack:
        for name, layer in layers:
            stack.callback(layer.register_forward_hook(hook_of(name)).remove)
        _run(model, tokens, documents)


@torch.no_grad()
def replace_attention(
    model: Model, layers: Sequence[Named], tokens: Tensor, call: Replacement, documents: Tensor | None = None
) -> None:
    """Run the model on tokens [B, T] with call(name, layer, input) -> output in place of each given layer's forward.

    `call` may run the layer itself, with gradients: its result is detached. Nothing runs after the last of the calls.
    """
    left = _calls(model, layers)

    def forward_of(
        name: str, layer: AttentionLayer, original: Callable[..., Tensor]
    ) -> Callable[..., Tensor]:
        def forward(x: Tensor, ctx: Context | Documents | None = None) -> Tensor:
            nonlocal left
            left -= 1
            with _own_forward(layer, original):
                output = call(name, layer, x)
            if left == 0:
                raise _Reached
            return output

        return forward

    with ExitStack() as stack:
        for name, layer in layers:
            stack.enter_context(_own_forward(layer, forward_of(name, layer, layer.forward)))
        _run(model, tokens, documents)


def _calls(model: Model, layers: Sequence[Named]) -> int:
    tapped = {id(layer) for _, layer in layers}
    return sum(id(layer) in tapped for _, layer in attention_applications(model))


def _run(model: Model, tokens: Tensor, documents: Tensor | None) -> None:
    try:
        model.hidden(tokens, documents=documents)
    except _Reached:
        return


@contextmanager
def _own_forward(module: nn.Module, forward: Callable[..., Any]) -> Any:
    """Override one module's forward inside a block."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
