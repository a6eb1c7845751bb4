"""Autotune attention: time the backends on families of shapes, with the candidates of a family interleaved."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from caramba.layer.score import SDPA, find_kernel
from caramba.lower.tune.timing import Timed, time_interleaved
from caramba.runtime.tuned import DOCUMENT_WAYS, FLEX, PADDED, VARLEN, BackendTimings, Family

WIDTHS = ((64, 64, True), (128, 128, True), (128, 64, False), (72, 48, True), (48, 64, True))
"""Width of keys and values and whether heads are grouped: teachers, latent students expanded and absorbed, per head."""
FAMILIES = tuple(
    Family(d_qk, d_v, grouped, masked, trains)
    for masked in (False, True)
    for d_qk, d_v, grouped in WIDTHS
    for trains in (True, False)
)


@dataclass(frozen=True)
class Size:
    """Size of the tensors that a family is timed on."""

    batch: int
    n_heads: int
    tokens: int
    dtype: torch.dtype

    @classmethod
    def on(cls, device: torch.device) -> Size:
        """Return a size large enough on a GPU to hide launch overhead, and small elsewhere."""
        if device.type == "cuda":
            return cls(8, 32, 2048, torch.bfloat16)
        return cls(1, 4, 128, torch.float32)


@dataclass(frozen=True)
class BackendCandidate:
    """A candidate for a family: an SDPA or document backend, and whether keys and values are padded to one width."""

    backend: str
    pads: bool

    @property
    def name(self) -> str:
        return self.backend + (PADDED if self.pads else "")


def candidates(family: Family, device: torch.device) -> list[BackendCandidate]:
    """Return what may run a family on a device. Math is one on a CPU only: it keeps all scores.

    Variable-length attention and FlexAttention, compiled, are candidates for documents on CUDA.
    """
    backends = ("cudnn", "flash", "efficient") if device.type == "cuda" else ("flash", "math")
    pad_options: tuple[bool, ...] = (False,)
    if family.d_qk != family.d_v:  # elsewhere than on CUDA the layers widen in any case
        pad_options = (False, True) if device.type == "cuda" else (True,)
    apart = (
        [BackendCandidate(backend, False) for backend in DOCUMENT_WAYS]
        if family.is_masked and device.type == "cuda"
        else []
    )
    return [*apart, *(BackendCandidate(backend, pads) for pads in pad_options for backend in backends)]


def measure_family(
    family: Family, device: torch.device, seconds: float, size: Size | None = None
) -> tuple[BackendTimings, dict[str, str]]:
    """Time all candidates of a family, interleaved, within about `seconds`; return the row and why some refused.

    What a forward makes once for all layers is left out: the mask of documents, that of blocks, starts of sequences.

    On CUDA the time is that of a replayed graph, so that what the host does is left out.
    """
    inputs = Inputs.random(family, device, size or Size.on(device))
    timed: list[Timed] = [Timed(candidate.name, inputs.call(candidate)) for candidate in candidates(family, device)]
    times, refused = time_interleaved(timed, device, seconds)
    found: dict[str, float | None] = {
        item.name: round(statistics.median(times[item.name]), 5) if item.name in times else None for item in timed
    }
    return BackendTimings(family, found, refused), refused


@dataclass(frozen=True)
class Inputs:
    """Tensors of a family, and the work of each candidate on them."""

    family: Family
    size: Size
    q: Tensor
    k: Tensor
    v: Tensor
    gradient: Tensor

    @classmethod
    def random(cls, family: Family, device: torch.device, size: Size) -> Inputs:
        """Sample tensors in the layers' layout, [B, T, H, D] viewed as [B, H, T, D], with scaled queries."""
        generator = torch.Generator(device).manual_seed(0)
        kv_heads = size.n_heads // 4 if family.is_grouped else size.n_heads

        def sample(heads: int, width: int, scale: float = 1.0) -> Tensor:
            shape = (size.batch, size.tokens, heads, width)
            x = torch.randn(shape, device=device, dtype=size.dtype, generator=generator)
            return (x * scale).transpose(1, 2)

        return cls(
            family,
            size,
            sample(size.n_heads, family.d_qk, family.d_qk**-0.5).requires_grad_(family.trains),
            sample(kv_heads, family.d_qk).requires_grad_(family.trains),
            sample(kv_heads, family.d_v).requires_grad_(family.trains),
            sample(size.n_heads, family.d_v),
        )

    def call(self, candidate: BackendCandidate) -> Callable[[], object]:
        """Return one repetition's work; anything else it needs is built in the first call."""
        document_calls = {VARLEN: self._varlen, FLEX: self._flex}
        forward = document_calls.get(candidate.backend) or partial(self._fused, candidate)

        def both() -> object:
            return torch.autograd.grad(forward(), (self.q, self.k, self.v), self.gradient)

        return both if self.family.trains else torch.no_grad()(forward)

    def _fused(self, candidate: BackendCandidate) -> Tensor:
        """Attend with a backend of scaled_dot_product_attention, heads repeated where the layers repeat them."""
        width = max(self.family.d_qk, self.family.d_v)
        q, k, v = (_widen(x, width) if candidate.pads else x for x in (self.q, self.k, self.v))
        groups = q.shape[1] // k.shape[1]
        repeats = groups > 1 and (self.family.is_masked or q.dtype == torch.float32)
        if repeats:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mask = self._mask if self.family.is_masked else None
        with sdpa_kernel([SDPA[candidate.backend]]):
            out = F.scaled_dot_product_attention(
                *(q, k, v),
                attn_mask=mask,
                is_causal=mask is None,
                scale=1.0,
                enable_gqa=groups > 1 and not repeats,
            )
        return out[..., : self.family.d_v]

    def _varlen(self) -> Tensor:
        kernel = find_kernel(self.q.device)
        if isinstance(kernel, str):
            raise RuntimeError(kernel)
        return kernel.attend(self.q, self.k, self.v, self._starts)

    def _flex(self) -> Tensor:
        attend, blocks = self._compiled_flex
        is_grouped = self.q.shape[1] != self.k.shape[1]
        return attend(self.q, self.k, self.v, block_mask=blocks, scale=1.0, enable_gqa=is_grouped)

    @cached_property
    def _document(self) -> Tensor:
        """The document of each token of a row, of four: int64 [T]."""
        return torch.arange(self.size.tokens, device=self.q.device) * 4 // self.size.tokens

    @cached_property
    def _mask(self) -> Tensor:
        """Which keys each query sees, [B, 1, T, T]."""
        places, document = torch.arange(self.size.tokens, device=self.q.device), self._document
        mask = (places[None, :] <= places[:, None]) & (document[None, :] == document[:, None])
        return mask.expand(self.size.batch, 1, -1, -1)

    @cached_property
    def _starts(self) -> Tensor:
        """Where documents begin in the tokens of all rows, and the end, int32 [4 B + 1]."""
        tokens = self.size.tokens
        first = [-(-tokens * number // 4) for number in range(4)]
        places = [row * tokens + place for row in range(self.size.batch) for place in first]
        return torch.tensor([*places, self.size.batch * tokens], device=self.q.device, dtype=torch.int32)

    @cached_property
    def _compiled_flex(self) -> tuple[Callable[..., Tensor], Any]:
        """FlexAttention compiled for these shapes, and its mask of blocks."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # slow to import

        document = self._document

        def sees(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (document[query] == document[key])

        torch.compiler.reset()  # or the shapes of all families count against one limit
        tokens = self.size.tokens
        blocks = create_block_mask(sees, None, None, tokens, tokens, device=str(self.q.device))
        compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
        return compiled, blocks


def _widen(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
