"""Builds a model with weights that depend on its spec and seed alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from caramba.config.model import ModelSpec
from caramba.model.model import Model
from caramba.model.topology.base import attention_applications

INIT_STD = 0.02


def build_model(spec: ModelSpec, *, seed: int | None = None, device: torch.device | str = "cpu") -> Model:
    """Build the model of a spec with fresh weights, in float32.

    Linear and embedding weights are normal(0, 0.02); the outputs of residual branches (attention `out`,
    SwiGLU `down`) are scaled by 1/sqrt(2 * depth), depth being the number of attention applications; norms
    are one, biases zero, gates and temperatures neutral. Weights are sampled on the CPU, so a seed gives the
    same model on any device.

    Args:
        seed: seeds these weights and leaves the global generator as it was; None draws from the global
        generator. device: where the model goes. "meta" builds shapes without weights: materialise with
            `model.to_empty(device=...)` and then load or `init_weights`.

    Reference: Radford et al., 2019 (GPT-2), section 2.3, for the residual scale.
    """
    if torch.device(device).type == "meta":
        with torch.device("meta"), SkipInit():
            return Model(spec)
    with _seeded(seed), torch.device("cpu"):
        model = Model(spec)
        init_weights(model)
    return model.to(device)


def init_weights(model: nn.Module) -> None:
    """Draw fresh weights in place from the global CPU generator, as `build_model` describes."""
    depth = max(1, sum(1 for _ in attention_applications(model)))
    residual = {
        getattr(module, name)
        for module in model.modules()
        for name in getattr(module, "residual_outputs", ())
    }
    # Children first: a module's own reset_parameters may then overrule what its children got.
    for module in reversed(list(model.modules())):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(
                module.weight, std=INIT_STD / (2 * depth) ** 0.5 if module in residual else INIT_STD
            )
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


def build_empty(spec: ModelSpec, device: torch.device | str) -> Model:
    """Build a model where it runs, in float32, with memory for weights that are still to be read into it."""
    with torch.device(device), SkipInit():
        model = Model(spec)
    return model.to(device)


def build_with_random_weights(spec: ModelSpec, device: torch.device) -> Model:
    """Build a model where it runs, quickly, for what does not depend on its weights: matrices normal(0, 0.02) and the
    rest one, the same on every device of a kind."""
    model = build_empty(spec, device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=INIT_STD, generator=generator)
            else:
                parameter.fill_(1.0)
    return model


class SkipInit(TorchFunctionMode):
    """Leaves `torch.nn.init` out, for weights that something else gives; on "meta" it would load the compiler.

    Buffers are filled: no checkpoint may hold them.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__module__", None) == nn.init.__name__:
            given = args[0] if args else (kwargs or {})["tensor"]
            if isinstance(given, nn.Parameter) or given.is_meta:
                return given
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed would seed the accelerators' generators too, which fork_rng(devices=[]) does not
        # restore.
        torch.default_generator.manual_seed(seed)
        yield
