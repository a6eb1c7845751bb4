"""Causal softmax attention of scaled queries over all cached keys, its variable-length kernels, and SDPA's backends."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from caramba.config.attention_dims import align_width
from caramba.errors import KernelUnavailable

if TYPE_CHECKING:
    from caramba.runtime.tuned import AttentionChoice

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


HALF_PRECISION = (torch.float16, torch.bfloat16)
Null = tuple[Tensor, Tensor] | None
"""A key [K*Dqk] and a value [K*Dv] that belong to no position."""

LOWER_RIGHT_ON = ("cuda",)
"""Devices whose backends support lower-right causality (the last T of S positions) without a mask [T, S]."""

TWO_WIDTHS = False
"""Whether the leading fused backend takes values of another width than keys."""


class CausalScore(nn.Module):
    """Attend: o = softmax(q k^T + mask) v, causal, over at most the last `window` keys (the query's own
    included).

    Queries arrive scaled, so the op's own scale is 1. The T queries are the last T of the S positions: query
    t has position S - T + t, with a cache or without. Query heads share key/value heads in consecutive groups
    of H/K. `dropout` zeroes attention probabilities in training.

    `q_chunk` attends from that many queries at a time, each chunk to the keys that it sees: the same numbers,
    with scores and masks of [q_chunk, S] in place of [T, S].

    Shape: q [B, H, T, Dqk], k [B, K, S, Dqk], v [B, K, S, Dv], returns [B, H, T, Dv] in q's dtype; k and v
    may come in another dtype, that of a cache. `null`, when given, is a key [K*Dqk] and a value [K*Dv] that
    belong to no position: every query sees them, whatever its window. `first`, when given, is the first key that
    each query may see, int64 [B, T] (see `Documents`), and then S = T. `starts` gives the same documents as offsets;
    an active variable-length kernel then computes the attention if it supports the call: no null key, no dropout,
    16 bits and at most 256 features.
    """

    def __init__(self, window: int | None = None, dropout: float = 0.0, q_chunk: int | None = None) -> None:
        super().__init__()
        self.window = window
        self.dropout = dropout
        self.q_chunk = q_chunk

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        null: Null = None,
        first: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        if starts is not None:
            kernel = self.varlen_kernel(q, v, null, starts)
            if kernel is not None:
                return kernel.attend(q, k.to(q.dtype), v.to(q.dtype), starts, self.window)
        n_queries, n_keys = q.shape[2], k.shape[2]
        size = self.q_chunk
        if size is None or n_queries <= size:
            return self._chunk(q, k, v, null, first)
        before = n_keys - n_queries
        outputs = []
        for start in range(0, n_queries, size):
            end = min(start + size, n_queries)
            lowest = None if first is None else first[:, start:end]
            seen = before + end
            outputs.append(self._chunk(q[:, :, start:end], k[:, :, :seen], v[:, :, :seen], null, lowest))
        return torch.cat(outputs, dim=2)

    def varlen_kernel(self, q: Tensor, v: Tensor, null: Null, starts: Tensor | None) -> VarlenKernel | None:
        """Return the variable-length kernel for attention within documents, or None if a mask is needed."""
        if starts is None or null is not None or (self.training and self.dropout > 0):
            return None
        kernel = active_kernel(q.device)
        return kernel if kernel is not None and kernel.serves(q, v, self.window) else None

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor, null: Null, first: Tensor | None) -> Tensor:
        n_queries, n_keys = q.shape[2], k.shape[2]
        if self.window is not None and n_keys > self.window + n_queries - 1:
            # Keys that even the first query no longer sees.
            left_out = n_keys - (self.window + n_queries - 1)
            n_keys -= left_out
            k, v = k[:, :, -n_keys:], v[:, :, -n_keys:]
            first = None if first is None else first - left_out
        if k.dtype != q.dtype or v.dtype != q.dtype:
            k, v = k.to(q.dtype), v.to(q.dtype)
        if null is not None:
            k, v = _prepend(null[0], k), _prepend(null[1], v)
        dropout = self.dropout if self.training else 0.0
        if n_queries == 1 and first is None:
            return _attend_single(q, k, v, dropout)
        if self._is_lower_right(q, n_keys, null, first):
            return _attend_lower_right(q, k, v, dropout)
        return _attend(q, k, v, self._mask(n_queries, n_keys, null is not None, first, q.device), dropout)

    def _is_lower_right(self, q: Tensor, n_keys: int, null: Null, first: Tensor | None) -> bool:
        """True if lower-right causality suffices, so that a backend flag replaces the mask."""
        return (
            q.device.type in LOWER_RIGHT_ON
            and q.shape[2] < n_keys
            and (self.window is None or self.window >= n_keys)
            and null is None
            and first is None
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )

    def _mask(
        self, n_queries: int, n_keys: int, has_null: bool, first: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return the mask of keys that each query sees, [T, S], or None if plain causality suffices.

        With `first` it is [B, 1, T, S]. The null key comes first: [..., 1 + S].
        """
        window = n_keys if self.window is None else self.window
        if n_queries == n_keys and window >= n_keys and not has_null and first is None:
            return None
        last = torch.arange(n_keys - n_queries, n_keys, device=device)[:, None]
        keys = torch.arange(n_keys, device=device)
        mask = (keys <= last) & (keys > last - window)
        if first is not None:
            mask = (mask & (keys >= first[:, :, None]))[:, None]
        return F.pad(mask, (1, 0), value=True) if has_null else mask

    def extra_repr(self) -> str:
        chunk = "" if self.q_chunk is None else f", q_chunk={self.q_chunk}"
        return f"window={self.window}, dropout={self.dropout}{chunk}"


def _prepend(null: Tensor, x: Tensor) -> Tensor:
    """Put one row per head, from [K*D], before the tokens of [B, K, S, D]."""
    batch, heads, _, width = x.shape
    return torch.cat((null.to(x.dtype).view(1, heads, 1, width).expand(batch, -1, -1, -1), x), dim=2)


def _attend_single(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attend from one query per sequence to every key: the heads of a group become queries of one head."""
    batch, n_heads, _, width = q.shape
    n_kv_heads = k.shape[1]
    grouped = q.reshape(batch, n_kv_heads, n_heads // n_kv_heads, width)
    out = F.scaled_dot_product_attention(grouped, k, v, dropout_p=dropout, scale=1.0)
    return out.reshape(batch, n_heads, 1, v.shape[-1])


def _set_two_widths(value: bool) -> None:
    global TWO_WIDTHS
    TWO_WIDTHS = value


def supports_two_widths(q: Tensor) -> bool:
    """True if the leading fused backend takes values of another width than keys."""
    return TWO_WIDTHS and q.is_cuda and q.dtype in HALF_PRECISION


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
    groups, v_width = q.shape[1] // k.shape[1], v.shape[-1]
    if not supports_two_widths(q):
        # Fused backends want one width; zero features change neither the score nor the kept part of the output.
        width = max(q.shape[-1], v_width)
        q, k, v = (_widen(x, width) for x in (q, k, v))
    # Only the 16-bit backends read grouped heads themselves, and only without a mask.
    is_grouped = groups > 1 and mask is None and q.dtype in HALF_PRECISION
    if groups > 1 and not is_grouped:
        k, v = _repeat(k, groups), _repeat(v, groups)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=1.0, enable_gqa=is_grouped
    )
    return out[..., :v_width]


def _attend_lower_right(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attend from the last T of S positions; flash reads grouped heads, others one for each query head."""
    from torch.nn.attention.bias import causal_lower_right  # which loads torch's compiler

    groups, v_width = q.shape[1] // k.shape[1], v.shape[-1]
    width = max(q.shape[-1], v_width)
    q, k, v = (_widen(x, width) for x in (q, k, v))
    is_grouped = groups > 1 and can_use_flash_attention(SDPAParams(q, k, v, None, dropout, False, True))
    if groups > 1 and not is_grouped:
        k, v = _repeat(k, groups), _repeat(v, groups)
    bias: Any = causal_lower_right(q.shape[2], k.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=1.0, enable_gqa=is_grouped)
    return out[..., :v_width]


def _repeat(x: Tensor, groups: int) -> Tensor:
    """Give every query head its key/value head, without a copy where all read the same one."""
    return x.expand(-1, groups, -1, -1) if x.shape[1] == 1 else x.repeat_interleave(groups, dim=1)


def _widen(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
PLAN_PAIRS = 1 << 30
"""Pairs of a query and a key from which a forward is worth a plan: cuDNN makes one for every new shape, in 80 to 100 ms
on an H200. By the rates of both there, flash loses as much at 32 rows of 6000 tokens on 16 layers of 2048 features."""


@contextmanager
def attention_backends(device: torch.device, choice: AttentionChoice | None = None) -> Iterator[AttentionChoice]:
    """Order SDPA backends for models on `device` by the table of `caramba tune`; yield the order.

    `choice` restricts the table to the shapes of given models; without it all its shapes count. Documents of a packed
    row use a variable-length kernel if the device has one and the choice selects it.
    """
    if choice is None:
        from caramba.runtime.tuned import choose_attention  # not for a decode loop, which has no table

        choice = choose_attention(device)
    chosen = choice
    kernel = find_kernel(device) if chosen.uses_varlen else None
    with varlen_attention(None if isinstance(kernel, str) else kernel):
        if chosen.order is None:
            yield chosen
            return
        before = TWO_WIDTHS
        _set_two_widths(chosen.keeps_two_widths)
        try:
            with sdpa_kernel([SDPA[name] for name in chosen.order], set_priority=True):
                yield chosen
        finally:
            _set_two_widths(before)


@contextmanager
def unplanned_attention(device: torch.device, n_pairs: int) -> Iterator[None]:
    """Prefer SDPA backends without per-shape plans, for prefill and growing caches.

    Torch picks cuDNN on Hopper and later. It builds a plan for every new shape, which takes longer than the forward of
    a prompt. The order does not change if `n_pairs`, the query-key pairs of a call, is large, on other devices, or if
    neither flash nor efficient is enabled. Disabled backends stay disabled. Blocks of several threads may overlap.
    """
    if device.type != "cuda" or n_pairs >= PLAN_PAIRS:
        yield
        return
    _unplanned.enter_block()
    try:
        yield
    finally:
        _unplanned.exit_block()


@contextmanager
def packed_attention(device: torch.device, n_tokens: int) -> Iterator[None]:
    """Run packed prefill: one row of `n_tokens` tokens that concatenates a fixed number of prompts.

    Attention uses a variable-length kernel if the device has one, otherwise a mask and backends without plans.
    """
    with torch.inference_mode(False):  # the kernel is checked once, with gradients
        kernel = find_kernel(device)
    with (
        unplanned_attention(device, n_tokens**2),
        fixed_documents(None if isinstance(kernel, str) else kernel),
    ):
        yield


class _Unplanned:
    """The order of `unplanned_attention`, which is the whole process's: the first block to begin sets it, in whichever
    thread, and the last to end brings back what was before."""

    def __init__(self) -> None:
        self._lock, self._n_blocks, self._order = threading.Lock(), 0, ExitStack()

    def enter_block(self) -> None:
        with self._lock:
            if self._n_blocks == 0:
                self._set()
            self._n_blocks += 1

    def exit_block(self) -> None:
        with self._lock:
            self._n_blocks -= 1
            if self._n_blocks == 0:
                self._order.close()

    def _set(self) -> None:
        backends = torch.backends.cuda
        flash, efficient = backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()
        if not (flash or efficient):  # math alone would be slower than any plan
            return
        enabled = {"flash": flash, "efficient": efficient, "math": backends.math_sdp_enabled()}
        order = [SDPA[name] for name, is_on in enabled.items() if is_on]
        self._order.enter_context(sdpa_kernel(order, set_priority=True))
        self._order.callback(_set_two_widths, TWO_WIDTHS)
        _set_two_widths(False)  # flash takes one width


_unplanned = _Unplanned()
