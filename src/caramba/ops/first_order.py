"""Refuses derivatives that ops do not have, second order and forward mode, where torch would return wrong values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from caramba.errors import ConfigError

Backward = Callable[..., Any]
_TRACES = "caramba_traces"


def first_order(op: str, backward: Backward) -> Backward:
    """Return a backward whose results refuse to be differentiated, where autograd keeps a graph of them.

    A backward reads means, roots and whole gradients that its forward kept, as if they were constants, and kernels
    leave no graph: a second derivative would lack terms, or all of them, without a word.
    """

    def run(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = backward(_Context(ctx, saved), *grads)
        there = [x for x in found if isinstance(x, Tensor)] if isinstance(found, tuple) else [found]
        if not there:
            return found
        # The inputs of the results, so that a derivative by any of them comes here. `own` always needs a gradient: a
        # backward of a sum with another loss would otherwise skip these results.
        sources = [x for x in (*grads, *saved) if x is not None and x.requires_grad]
        sources += getattr(ctx, _TRACES, ())
        own = torch.zeros((), requires_grad=True)
        marked = _Refused.apply(op, len(there), *there, own, *sources)
        if not isinstance(found, tuple):
            return marked[0]
        rest = iter(marked)
        return tuple(next(rest) if isinstance(x, Tensor) else x for x in found)

    return run


def leave_traces(result: Tensor, *inputs: Tensor) -> None:
    """Link a result to its inputs so that `first_order` refuses second derivatives by them.

    For an op whose backward saves none of its inputs: `torch.autograd.grad` runs only nodes on a path to the requested
    inputs. The link is an empty slice of each input. Under a trace there is none, as traced graphs have no second
    derivatives.
    """
    if torch.compiler.is_compiling() or result.grad_fn is None:
        return
    setattr(result.grad_fn, _TRACES, [x[:0].clone() for x in inputs if x.requires_grad])


class _Context:
    """A context whose saved tensors have been read: hooks of activation checkpointing unpack them only once."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor, ...]) -> None:
        self.ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)


def refuse_tangents(op: str, *given: Any) -> None:
    """Refuse tensors that forward-mode differentiation follows: no op gives tangents, and torch takes them for zero.

    Raises:
        NotImplementedError: one has a tangent.
    """
    if forward_ad._current_level < 0:
        return
    for x in given:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{op}: forward-mode derivatives (jvp, dual numbers) are not there; differentiate backwards, or "
                "compute the same function in plain PyTorch"
            )


def refuse_gradients(op: str, *given: Tensor) -> None:
    """Refuse inputs of an op without gradients that some are wanted of.

    Raises:
        ConfigError: gradients that are wanted.
    """
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        raise ConfigError(
            f"{op}: got inputs that require gradients, expected none; call it under torch.inference_mode()"
        )


class _Refused(torch.autograd.Function):
    """Hands tensors on, and raises where their gradient is asked for."""

    @staticmethod
    def forward(op: str, count: int, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in given[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.op = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"{ctx.op}: its gradient cannot be differentiated; compute the same function in plain PyTorch where "
            "second derivatives are needed"
        )
