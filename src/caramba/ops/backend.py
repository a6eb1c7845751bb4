"""Which implementation each op runs on which device: the reference, until a launcher is attached."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, ClassVar, Protocol

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from caramba.errors import KernelUnavailable
from caramba.ops.first_order import first_order, refuse_tangents

REFERENCE = "reference"
OPS = (
    "absorbed_queries",
    "absorbed_step",
    "adamw_step",
    "add_layer_norm",
    "add_rms_norm",
    "cross_entropy_rows",
    "dba_append",
    "dba_decode",
    "dba_decode_up",
    "decoupled_attention",
    "decoupled_attention_backward",
    "dequantize",
    "distillation_rows",
    "drawn",
    "float8_cast",
    "float8_swiglu",
    "float8_swiglu_backward",
    "head_values",
    "keep_drawn",
    "latent_queries",
    "latent_queries_backward",
    "layer_norm",
    "layer_norm_backward",
    "likeliest",
    "lion_step",
    "list_norms",
    "lookup_round",
    "norm_dropout_activation",
    "norm_dropout_activation_backward",
    "numbers_of_words",
    "quantize",
    "rms_norm",
    "rms_norm_backward",
    "rope",
    "rope_qkv",
    "rope_qkv_backward",
    "round_at_random",
    "row_linear",
    "scale_",
    "step_angles",
    "store_tokens",
    "swiglu",
    "swiglu_backward",
    "swiglu_packed",
    "swiglu_packed_backward",
)
"""Ops under `torch.ops.caramba` that have a contract."""

TRITON_AVAILABLE: bool = importlib.util.find_spec("triton") is not None
"""Triton is installed; its kernels run where there is a CUDA device."""
METAL_AVAILABLE: bool = torch.backends.mps.is_available()
"""This process can use Apple's Metal device."""

DISPATCH_KEYS = {"cuda": "CUDA", "mps": "MPS", "cpu": "CPU"}
_attached: dict[tuple[str, str], str] = {}
_launchers: dict[tuple[str, str], Callable[..., Any]] = {}
PLAIN = (torch.Tensor, torch.nn.Parameter)
_eager: dict[str, type[torch.autograd.Function]] = {}
_compilers: dict[str, str | None] = {}

DECOUPLED = (("k_sem", "k_geo", "v"), ("c", "k_geo"))
"""Streams of the caches that `dba_decode` reads in every format."""


class _Cache(Protocol):
    names: ClassVar[tuple[str, ...]]
    keeps_first_tokens: ClassVar[bool]

    @property
    def is_rotated(self) -> bool: ...

    @property
    def n_packed(self) -> int | None: ...


def attach(op: str, device_type: str, backend: str, launcher: Callable[..., Any]) -> None:
    """Run `launcher` for an op's tensors on a type of device; attaching the same backend again changes nothing.

    Raises:
        KernelUnavailable: an op without a contract, or another backend is attached already.
    """
    if op not in OPS or device_type not in DISPATCH_KEYS:
        raise KernelUnavailable(
            f"op {op!r} on {device_type!r}: no such contract; ops: {', '.join(OPS)}; "
            f"devices: {', '.join(DISPATCH_KEYS)}"
        )
    present = _attached.get((op, device_type))
    if present == backend:
        return
    if present is not None:
        raise KernelUnavailable(f"op {op} on {device_type}: {present} is attached, cannot attach {backend}")
    torch.library.impl(f"caramba::{op}", DISPATCH_KEYS[device_type], launcher)
    _attached[op, device_type] = backend
    _launchers[op, device_type] = launcher


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
    the result is an autograd function with the op's own gradient (`differentiable`), if it has one. Tensor subclasses,
    traces and dispatch modes always get the op.
    """
    refuse_tangents(op, *tensors)
    if not _launchers or torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
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
    launcher = _launchers.get((op, "cuda" if first.is_cuda else first.device.type))
    if launcher is None or not needs_grad:
        return launcher
    function = _eager.get(op)
    return None if function is None else function.apply


def differentiable(
    op: str, backward: Callable[..., Any], setup: Callable[..., None], *, is_linear: bool = False
) -> None:
    """Give an op its gradient, through the dispatcher and for `direct`.

    `setup(ctx, inputs, output)` keeps what `backward(ctx, *grads)` needs, as `torch.library.register_autograd` has it.
    Inputs: all of the op's arguments, the tensors one by one, the first one there. `is_linear`: the gradient is made of
    ops that have gradients; any other refuses to be differentiated once more.
    """
    if not is_linear:
        backward = first_order(op, backward)
    torch.library.register_autograd(f"caramba::{op}", backward, setup_context=setup)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = _launchers[op, inputs[0].device.type](*inputs)
        setup(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    _eager[op] = type(f"{op}_eager", (torch.autograd.Function,), methods)


def call_op(op: str, *inputs: Any) -> Any:
    """Run an op of tensors and numbers, straight away where `direct` does."""
    straight = direct(op, *(x for x in inputs if isinstance(x, torch.Tensor)))
    return (straight or getattr(torch.ops.caramba, op).default)(*inputs)


@contextlib.contextmanager
def without_kernels(*ops: str) -> Iterator[None]:
    """Run a block as if no launcher, or none of these ops, were attached: layers then take their plain PyTorch code.

    For comparisons.
    """
    attached, launchers = dict(_attached), dict(_launchers)
    for place in attached:
        if not ops or place[0] in ops:
            _attached.pop(place)
            _launchers.pop(place, None)
    try:
        yield
    finally:
        _attached.update(attached)
        _launchers.update(launchers)


def get_backend_info(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Return what runs the ops on a device: {device, triton, nvrtc, metal, ops: {name: backend}}.

    `triton` is the installed version or None, `nvrtc` that of the compiler of CUDA C++ that was found when kernels were
    attached on CUDA, or None, `metal` whether there is such a device.
    """
    return {
        "device": str(torch.device(device)),
        "triton": version("triton") if TRITON_AVAILABLE else None,
        "nvrtc": _compilers.get("nvrtc"),
        "metal": METAL_AVAILABLE,
        "ops": {op: implementation(op, device) for op in OPS},
    }


def fused_decode_available(cache: _Cache, device: torch.device | str) -> bool:
    """Whether a decode step on this cache runs a kernel that reads the stored format, without dequantising first.

    It does for the caches of decoupled attention where a launcher of `dba_decode` is attached, and for quantised caches
    of undivided keys; torch's backends read the unquantised ones. It does not where blocks are Hadamard-rotated (the
    tail is not, and one query cannot serve both) or first tokens are kept exact (their keys have another shape).
    """
    if not _attached or ("dba_decode", torch.device(device).type) not in _attached:
        return False
    is_read = cache.names in DECOUPLED or cache.n_packed is not None
    return is_read and not (cache.is_rotated or cache.keeps_first_tokens)
