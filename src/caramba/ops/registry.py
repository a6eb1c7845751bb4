"""Registers ops: `@caramba_op` on a reference gives an op its schema, fake and gradient. The folder is the list."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.library import infer_schema

from caramba.ops.first_order import first_order

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)


class Op(NamedTuple):
    """An op under `torch.ops.caramba`."""

    name: str
    module: str
    """The module of its contract."""
    takes_kernel: bool
    """False where the op is made of other ops and never has a kernel of its own."""


_ops: dict[str, Op] = {}
launchers: dict[tuple[str, str], Function] = {}
"""Kernel launchers by op and type of device."""
eager_functions: dict[str, type[torch.autograd.Function]] = {}
"""Autograd functions that run a launcher without the dispatcher, by op."""


def caramba_op(
    name: str,
    *,
    fake: Function | None = None,
    mutates: Sequence[str] = (),
    schema: str | None = None,
    setup: Function | None = None,
    backward: Function | None = None,
    is_linear: bool = False,
    is_eager: bool = True,
    takes_kernel: bool = True,
) -> Callable[[F], F]:
    """Register the decorated function, the reference in plain PyTorch, as the op `caramba::NAME`.

    The schema comes from its annotations. Integers are constants of a compiled graph.

    Args:
        fake: returns uninitialised results of the right shape; None where the op returns nothing.
        mutates: arguments that the op writes to.
        schema: arguments and results, where `torch.library.infer_schema` does not know a type (`list[str]`).
        setup: `setup(ctx, inputs, output)` keeps what `backward` needs, as in `torch.library.register_autograd`.
            Inputs: all of the op's arguments, the tensors one by one, the first one there.
        backward: `backward(ctx, *grads)` returns a gradient for each argument.
        is_linear: the gradient is made of ops that have gradients; any other refuses a second derivative.
        is_eager: with gradients, an eager call runs the launcher without the dispatcher.
        takes_kernel: False for an op made of other ops.
    """

    def register(reference: F) -> F:
        qualified = f"caramba::{name}"
        inferred = schema or infer_schema(reference, mutates_args=mutates).replace("SymInt", "int")
        torch.library.define(qualified, inferred)
        torch.library.impl(qualified, "CompositeExplicitAutograd", reference)
        torch.library.register_fake(qualified, fake or _return_nothing)
        if backward is not None and setup is not None:
            gradient = backward if is_linear else first_order(name, backward)
            torch.library.register_autograd(qualified, gradient, setup_context=setup)
            if is_eager:
                eager_functions[name] = _eager_function(name, setup, gradient)
        _ops[name] = Op(name, reference.__module__, takes_kernel)
        return reference

    return register


def all_ops() -> dict[str, Op]:
    """Import every module of this package, and return the ops that can have kernels, by name in order."""
    package = importlib.import_module("caramba.ops")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"caramba.ops.{module.name}")
    return {name: op for name, op in sorted(_ops.items()) if op.takes_kernel}


def _return_nothing(*_: Any) -> None:
    return None


def _eager_function(name: str, setup: Function, backward: Function) -> type[torch.autograd.Function]:
    def forward(ctx: Any, *inputs: Any) -> Any:
        output = launchers[name, inputs[0].device.type](*inputs)
        setup(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"{name}_eager", (torch.autograd.Function,), methods)
