"""Times the attention backends on families of shapes, the candidates of a family in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from caramba.layer.backends import SDPA
from caramba.runtime.tuned import PADDED, Family, Row
from caramba.tune.timing import Timed, time_in_turn

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
    """How large the tensors are that a family is timed on."""

    batch: int
    n_heads: int
    tokens: int
    dtype: torch.dtype

    @classmethod
    def on(cls, device: torch.device) -> Size:
        """Large enough on a GPU that launching does not count; small elsewhere."""
        if device.type == "cuda":
            return cls(8, 32, 2048, torch.bfloat16)
        return cls(1, 4, 128, torch.float32)


@dataclass(frozen=True)
class Candidate:
    """One way to run a family: a backend, and whether keys and values are widened to one width."""

    backend: str
    pads: bool

    @property
    def name(self) -> str:
        return self.backend + (PADDED if self.pads else "")


def candidates(family: Family, device: torch.device) -> list[Candidate]:
    """Return what may run a family on a device. Math is one on a CPU only: it keeps all scores."""
    backends = ("cudnn", "flash", "efficient") if device.type == "cuda" else ("flash", "math")
    ways: tuple[bool, ...] = (False,)
    if family.d_qk != family.d_v:  # elsewhere than on CUDA the layers widen in any case
        ways = (False, True) if device.type == "cuda" else (True,)
    return [Candidate(backend, pads) for pads in ways for backend in backends]


def measure_family(
    family: Family, device: torch.device, seconds: float, size: Size | None = None
) -> tuple[Row, dict[str, str]]:
    """Time all candidates of a family, interleaved, within about `seconds`; return the row and why some refused.

    On CUDA the time is that of a replayed graph, so that what the host does is left out.
    """
    inputs = _Inputs.drawn(family, device, size or Size.on(device))
    timed: list[Timed] = [
        Timed(candidate.name, inputs.call(family, candidate)) for candidate in candidates(family, device)
    ]
    times, refused = time_in_turn(timed, device, seconds)
    found: dict[str, float | None] = {
        item.name: round(statistics.median(times[item.name]), 5) if item.name in times else None
        for item in timed
    }
    return Row(family, found), refused


@dataclass(frozen=True)
class _Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    gradient: Tensor
    mask: Tensor | None

    @classmethod
    def drawn(cls, family: Family, device: torch.device, size: Size) -> _Inputs:
        """Draw tensors as the layers make them: [B, T, H, D] seen as [B, H, T, D], with a mask every head its own."""
        generator = torch.Generator(device).manual_seed(0)
        expands = family.is_masked or size.dtype == torch.float32  # as the layers do
        kv_heads = size.n_heads // 4 if family.is_grouped and not expands else size.n_heads

        def drawn(heads: int, width: int) -> Tensor:
            shape = (size.batch, size.tokens, heads, width)
            x = torch.randn(shape, device=device, dtype=size.dtype, generator=generator)
            return x.transpose(1, 2)

        return cls(
            drawn(size.n_heads, family.d_qk).requires_grad_(family.trains),
            drawn(kv_heads, family.d_qk).requires_grad_(family.trains),
            drawn(kv_heads, family.d_v).requires_grad_(family.trains),
            drawn(size.n_heads, family.d_v),
            _documents_mask(size, device) if family.is_masked else None,
        )

    def call(self, family: Family, candidate: Candidate) -> Callable[[], object]:
        """Return the work of one repetition."""
        width = max(family.d_qk, family.d_v)
        is_grouped = self.q.shape[1] != self.k.shape[1]

        def forward() -> Tensor:
            q, k, v = (_widen(x, width) if candidate.pads else x for x in (self.q, self.k, self.v))
            with sdpa_kernel([SDPA[candidate.backend]]):
                out = F.scaled_dot_product_attention(
                    *(q, k, v),
                    attn_mask=self.mask,
                    is_causal=self.mask is None,
                    scale=family.d_qk**-0.5,
                    enable_gqa=is_grouped,
                )
            return out[..., : family.d_v]

        def both() -> object:
            return torch.autograd.grad(forward(), (self.q, self.k, self.v), self.gradient)

        return both if family.trains else torch.no_grad()(forward)


def _widen(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


def _documents_mask(size: Size, device: torch.device) -> Tensor:
    """Return which keys each query sees in rows of four documents, [B, 1, T, T]."""
    places = torch.arange(size.tokens, device=device)
    document = places * 4 // size.tokens
    mask = (places[None, :] <= places[:, None]) & (document[None, :] == document[:, None])
    return mask.expand(size.batch, 1, -1, -1)
