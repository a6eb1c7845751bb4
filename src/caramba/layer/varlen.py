"""Attention within the documents of packed rows by variable-length kernels, without work across documents."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.config.attention_dims import align_width
from caramba.errors import KernelUnavailable

WIDEST = 256
"""Features of a head that flash attention takes."""
OPERANDS = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
EVEN = 8
"""Features of 16 bits in the 16 bytes that the kernels load at once."""
TOLERANCE = 0.02  # relative, of outputs and gradients in bfloat16


@dataclass(frozen=True)
class VarlenKernel:
    """A function with the signature of `torch.nn.attention.varlen.varlen_attn`, in any form that torch has had.

    Attributes:
        takes: names of its parameters. Causality is a window of (-1, 0) or the flag `is_causal`; without `scale` it
            is 1/sqrt(D).
        device: type of the tensors it serves. dtypes: theirs.
        is_grouped: query heads may share key/value heads; else these are repeated to the query heads.
    """

    call: Callable[..., Any]
    takes: frozenset[str]
    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)
    is_grouped: bool = False

    @classmethod
    def of(cls, call: Callable[..., Any], **serves: Any) -> VarlenKernel:
        """Read the signature of `call`.

        Raises:
            KernelUnavailable: a signature that is none of the known ones.
        """
        parameters = inspect.signature(call).parameters
        needed = {name for name, item in parameters.items() if item.default is inspect.Parameter.empty}
        if tuple(parameters)[: len(OPERANDS)] != OPERANDS or not needed <= set(OPERANDS):
            raise KernelUnavailable(
                f"varlen_attn of torch {torch.__version__} takes ({', '.join(parameters)}), expected "
                f"({', '.join(OPERANDS)}) and options; documents are separated by a mask"
            )
        if not {"window_size", "is_causal"} & set(parameters):
            raise KernelUnavailable(
                f"varlen_attn of torch {torch.__version__} has neither window_size nor is_causal, so no causality; "
                "documents are separated by a mask"
            )
        return cls(call, frozenset(parameters), is_grouped="enable_gqa" in parameters, **serves)

    def serves(self, q: Tensor, v: Tensor, window: int | None) -> bool:
        """Return whether the kernel supports these queries [B, H, T, Dqk] and values [B, K, T, Dv]."""
        return (
            q.device.type == self.device
            and q.dtype in self.dtypes
            and max(q.shape[-1], v.shape[-1]) <= WIDEST
            and (window is None or "window_size" in self.takes)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, window: int | None = None) -> Tensor:
        """Return causal softmax(q k^T) v within every sequence, over at most the last `window` keys.

        Only the device knows the longest sequence; the row length bounds it. The narrower of keys and values is padded
        with zeros, which change neither the scores nor the features returned.

        Shape: q [B, H, T, Dqk], k [B, K, T, Dqk], v [B, K, T, Dv], starts as `Documents` has them -> [B, H, T, Dv].
        """
        (batch, n_heads, tokens, _), v_width = q.shape, v.shape[-1]
        width = align_width(max(q.shape[-1], v_width))
        groups = n_heads // k.shape[1]
        words: dict[str, Any] = {}
        if "scale" in self.takes:
            words["scale"] = 1.0
        else:
            q = q * math.sqrt(width)
        if groups > 1 and "enable_gqa" in self.takes:
            words["enable_gqa"] = True
        elif groups > 1 and not self.is_grouped:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        if "window_size" in self.takes:
            words["window_size"] = (-1 if window is None else window - 1, 0)
        else:
            words["is_causal"] = True
        # Padding by zero features copies, which misaligned rows need for 16-byte loads.
        wide = (x if has_aligned_rows(x, width) else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        rows = (x.transpose(1, 2).flatten(0, 1) for x in wide)
        out = self.call(*rows, starts, starts, tokens, tokens, **words)
        return out[..., :v_width].unflatten(0, (batch, tokens)).transpose(1, 2)


def has_aligned_rows(x: Tensor, width: int) -> bool:
    """Return whether rows are contiguous, `width` features wide, and each aligned to `EVEN` elements.

    Parts of a fused linear's output may be misaligned. False while compiling, where addresses are unknown.
    """
    if torch.compiler.is_compiling():
        return False
    places = (x.storage_offset(), *x.stride()[:-1])
    return x.shape[-1] == width and x.stride(-1) == 1 and not any(place % EVEN for place in places)


_active: VarlenKernel | None = None
_own = threading.local()


def active_kernel(device: torch.device) -> VarlenKernel | None:
    """Return the active kernel for attention within documents, or None.

    None inside a graph, whose shapes cannot follow the documents, except inside `fixed_documents`.
    """
    own: VarlenKernel | None = getattr(_own, "kernel", None)
    if own is not None and own.device == device.type:
        return own
    if _active is None or _active.device != device.type or torch.compiler.is_compiling():
        return None
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    return _active


@contextmanager
def varlen_attention(kernel: VarlenKernel | None) -> Iterator[None]:
    """Use `kernel` for attention within documents if it supports the call; None uses a mask."""
    global _active
    before, _active = _active, kernel
    try:
        yield
    finally:
        _active = before


@contextmanager
def fixed_documents(kernel: VarlenKernel | None) -> Iterator[None]:
    """Use `kernel` in this thread for a fixed number of documents.

    Only for forwards without gradients, which may then be captured in a graph.
    """
    before, _own.kernel = getattr(_own, "kernel", None), kernel
    try:
        yield
    finally:
        _own.kernel = before


@functools.cache
def find_kernel(device: torch.device) -> VarlenKernel | str:
    """Return the device's kernel after checking it against a mask, or why there is none."""
    if device.type != "cuda":
        return f"variable-length attention is for CUDA, not for {device.type}"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn, expected 2.11 or later"
    return check_kernel(varlen_attn, device)


def check_kernel(call: Callable[..., Any], device: torch.device, **serves: Any) -> VarlenKernel | str:
    """Check a function against a mask on a device; return its kernel, or what is wrong with it.

    torch 2.11 has no argument for grouped heads, but its NVIDIA kernel supports them (seen on an H200): that is tried
    first.
    """
    try:
        plain = VarlenKernel.of(call, device=device.type, **serves)
    except KernelUnavailable as refusal:
        return str(refusal)
    grouped = replace(plain, is_grouped=True)
    if plain.is_grouped or torch.version.hip is not None:
        return _refusal(plain, device) or plain
    return grouped if _refusal(grouped, device) is None else _refusal(plain, device) or plain


def _refusal(kernel: VarlenKernel, device: torch.device) -> str | None:
    """Return what is wrong with a kernel on a device, None if it agrees with a mask."""
    try:
        error = measure_error(kernel, device)
    except (RuntimeError, TypeError, ValueError) as refusal:
        return f"varlen_attn does not run: {type(refusal).__name__}: {str(refusal).partition(chr(10))[0]}"
    if not error <= TOLERANCE:
        return f"varlen_attn differs from the mask by {error:.2g} relative, expected at most {TOLERANCE:g}"
    return None


def measure_error(kernel: VarlenKernel, device: torch.device) -> float:
    """Return the largest relative error of outputs and gradients against a mask, on small rows.

    The reference runs in float32 or float64. Cases: grouped heads, keys wider than values, documents of one token, and
    a window if the kernel supports one.
    """
    generator = torch.Generator(device).manual_seed(0)
    places = torch.tensor([0, 1, 40, 96, 111, 192], device=device)
    starts = places.to(torch.int32)
    document = torch.bucketize(torch.arange(192, device=device), places, right=True).view(2, 96)
    is_other = (document[:, :, None] != document[:, None, :])[:, None]
    distance = torch.arange(96, device=device)[:, None] - torch.arange(96, device=device)

    def sample(heads: int, width: int) -> Tensor:
        x = torch.randn(2, 96, heads, width, device=device, generator=generator)
        return x.to(kernel.dtypes[-1]).transpose(1, 2).requires_grad_()

    q, k, v, gradient = sample(4, 72), sample(2, 72), sample(2, 64), sample(4, 64).detach()
    worst = 0.0
    for window in (None, 7) if "window_size" in kernel.takes else (None,):
        with torch.enable_grad(), torch.autocast(device.type, enabled=False):
            found = kernel.attend(q * 72**-0.5, k, v, starts, window)
            ours = (found, *torch.autograd.grad(found, (q, k, v), gradient))
            wide = torch.promote_types(q.dtype, torch.float32)
            q_wide, k_wide, v_wide = (x.to(wide) for x in (q, k, v))
            scores = (q_wide * 72**-0.5) @ k_wide.repeat_interleave(2, 1).mT
            hidden = is_other | (distance < 0) | (distance >= (window or 96))
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            exact = weights @ v_wide.repeat_interleave(2, 1)
            theirs = (exact, *torch.autograd.grad(exact, (q, k, v), gradient.to(wide)))
        for one, other in zip(ours, theirs, strict=True):
            error = float((one.to(wide) - other).detach().norm() / other.detach().norm())
            worst = max(worst, error) if error == error else math.inf
    return worst
