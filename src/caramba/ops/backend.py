"""Ops: `@caramba_op` registers one, the folder is their list, and each runs its reference or an attached kernel."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import infer_schema
from torch.utils._python_dispatch import _get_current_dispatch_mode

from caramba.errors import ConfigError, KernelUnavailable

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


WIDE = (torch.float32, torch.float64)


def describe(x: Tensor) -> str:
    """Return dtype, shape and device for a message."""
    return f"{x.dtype} {list(x.shape)} on {x.device}"


def refusal(op: str, name: str, got: object, expected: str) -> ConfigError:
    return ConfigError(f"{op}: {name}: got {got}, expected {expected}")


def upcast(x: Tensor) -> Tensor:
    """Return x in at least float32."""
    return x if x.dtype in WIDE else x.to(torch.promote_types(x.dtype, torch.float32))


def empty_upcast(x: Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    """Return an uninitialised tensor of `shape` in the dtype that `widened` gives x."""
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
REFERENCE = "reference"

TRITON_AVAILABLE: bool = importlib.util.find_spec("triton") is not None
"""Triton is installed; its kernels run where there is a CUDA device."""
METAL_AVAILABLE: bool = torch.backends.mps.is_available()
"""This process can use Apple's Metal device."""

DISPATCH_KEYS = {"cuda": "CUDA", "mps": "MPS", "cpu": "CPU"}
_attached: dict[tuple[str, str], str] = {}
PLAIN = (torch.Tensor, torch.nn.Parameter)
_compilers: dict[str, str | None] = {}

DECOUPLED = (("k_sem", "k_geo", "v"), ("c", "k_geo"))
"""Streams of the caches that `dba_decode` reads in every format."""


class _Cache(Protocol):
    keeps_first_tokens: ClassVar[bool]

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def is_rotated(self) -> bool: ...

    @property
    def n_packed(self) -> int | None: ...


class Op(NamedTuple):
    """An op under `torch.ops.caramba`."""

    name: str
    module: str
    """The module of its contract."""
    takes_kernel: bool
    """False where the op is made of other ops and never has a kernel of its own."""
    reference: Function
    """What runs where no kernel does."""


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
        _ops[name] = Op(name, reference.__module__, takes_kernel, reference)
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


def attach(op: str, device_type: str, backend: str, launcher: Callable[..., Any]) -> None:
    """Run `launcher` for an op's tensors on a type of device; attaching the same backend again changes nothing.

    Raises:
        KernelUnavailable: an op without a contract, or another backend is attached already.
    """
    if op not in all_ops() or device_type not in DISPATCH_KEYS:
        raise KernelUnavailable(
            f"op {op!r} on {device_type!r}: no such contract; ops: {', '.join(all_ops())}; "
            f"devices: {', '.join(DISPATCH_KEYS)}"
        )
    present = _attached.get((op, device_type))
    if present == backend:
        return
    if present is not None:
        raise KernelUnavailable(f"op {op} on {device_type}: {present} is attached, cannot attach {backend}")
    torch.library.impl(f"caramba::{op}", DISPATCH_KEYS[device_type], launcher)
    _attached[op, device_type] = backend
    launchers[op, device_type] = launcher


def found_compiler(name: str, found: str | None) -> None:
    """Say which version of a compiler kernels have on this machine, None for none."""
    _compilers[name] = found


def implementation(op: str, device: torch.device | str) -> str:
    """Return the name of the backend that runs an op on a device, `reference` where nothing is attached."""
    return _attached.get((op, torch.device(device).type), REFERENCE)


def is_fused(op: str, x: torch.Tensor) -> bool:
    """Whether a call of an op on x runs a kernel. Never while compiling: Inductor fuses elementwise code itself."""
    return has_kernel(op, x) and not torch.compiler.is_compiling()


def has_kernel(op: str, x: torch.Tensor) -> bool:
    """Whether a kernel is attached for an op on x's device: what to ask where Inductor fuses less than the kernel."""
    return bool(_attached) and (op, x.device.type) in _attached


def direct(op: str, *tensors: torch.Tensor | None) -> Callable[..., Any] | None:
    """Return the op's launcher if it may bypass the dispatcher, else None.

    The dispatcher and torch's Python around the op's autograd take longer than a launch. Where gradients are needed
    the result is an autograd function with the op's own gradient, if it has one. Tensor subclasses,
    traces and dispatch modes always get the op.
    """
    refuse_tangents(op, *tensors)
    if not launchers or torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return None
    needs_grad = False
    for x in tensors:
        if x is not None:
            if type(x) not in PLAIN:
                return None
            needs_grad = needs_grad or x.requires_grad
    needs_grad = needs_grad and torch.is_grad_enabled()
    first = tensors[0]
    assert first is not None
    # `x.device` creates an object on each access; `is_cuda` does not.
    launcher = launchers.get((op, "cuda" if first.is_cuda else first.device.type))
    if launcher is None or not needs_grad:
        return launcher
    function = eager_functions.get(op)
    return None if function is None else function.apply


def call_op(op: str, *inputs: Any) -> Any:
    """Run an op of tensors and numbers, straight away where `direct` does."""
    straight = direct(op, *(x for x in inputs if isinstance(x, torch.Tensor)))
    return (straight or getattr(torch.ops.caramba, op).default)(*inputs)


@contextlib.contextmanager
def without_kernels(*ops: str) -> Iterator[None]:
    """Run a block as if no launcher, or none of these ops, were attached: layers then take their plain PyTorch code.

    For comparisons.
    """
    attached, launched = dict(_attached), dict(launchers)
    for place in attached:
        if not ops or place[0] in ops:
            _attached.pop(place)
            launchers.pop(place, None)
    try:
        yield
    finally:
        _attached.update(attached)
        launchers.update(launched)


def get_backend_info(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return what runs the ops on a device: {device, triton, nvrtc, metal, metal_dba, ops: {name: backend}}.

    `triton` is the installed version or None, `nvrtc` that of the compiler of CUDA C++ that was found when kernels were
    attached on CUDA, or None, `metal` whether there is such a device, `metal_dba` whether its kernel of `dba_decode` is
    attached there.
    """
    return {
        "device": str(torch.device(device)),
        "triton": version("triton") if TRITON_AVAILABLE else None,
        "nvrtc": _compilers.get("nvrtc"),
        "metal": METAL_AVAILABLE,
        "metal_dba": implementation("dba_decode", "mps") == "metal",
        "ops": {op: implementation(op, device) for op in all_ops()},
    }


def fused_decode_available(cache: _Cache, device: torch.device | str) -> bool:
    """Whether a decode step on this cache runs a kernel that reads the stored format, without dequantising first.

    It does for the caches of decoupled attention where a launcher of `dba_decode` is attached, and for quantised caches
    of undivided keys; torch's backends read the unquantised ones. It does not where blocks are Hadamard-rotated (the
    tail is not, and one query cannot serve both) or first tokens are kept exact (their keys have another shape). On
    Metal it does not for quantised caches: the kernel there reads numbers alone.
    """
    if not _attached or ("dba_decode", torch.device(device).type) not in _attached:
        return False
    if cache.n_packed is not None and implementation("dba_decode", device) == "metal":
        return False
    is_read = cache.names in DECOUPLED or cache.n_packed is not None
    return is_read and not (cache.is_rotated or cache.keeps_first_tokens)


def check_rows(op: str, x: Tensor, residual: Tensor | None = None, **affine: Tensor | None) -> None:
    """Check a tensor of rows, its residual, and vectors as long as a row.

    Raises:
        ConfigError: x is not floating point, the residual differs from it, or a vector is not floating [D] on its
            device.
    """
    if not x.is_floating_point() or x.dim() < 1:
        raise ConfigError(
            f"{op}: x is {x.dtype} of shape {tuple(x.shape)}, expected a floating dtype and one axis at least"
        )
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device):
        raise ConfigError(f"{op}: residual is {describe(residual)}, expected {describe(x)}, as x")
    width = x.shape[-1]
    for name, vector in affine.items():
        if vector is None:
            continue
        fits = vector.dim() == 1 and vector.shape[0] == width and vector.is_floating_point()
        if not fits or vector.device != x.device:
            raise ConfigError(f"{op}: {name} is {describe(vector)}, expected floating ({width},) on {x.device}")
