"""Rotary position embedding with explicit frequencies."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from caramba.config.layer_base import RopeScalingConfig
from caramba.errors import ConfigError
from caramba.ops import has_kernel, is_fused
from caramba.ops.backend import upcast
from caramba.ops.rope import cos_sin, rope, rope_cos_sin

MIN_TABLE_TOKENS = 64
"""Minimum tokens for which a compiled graph stores cos and sin: below it the launch costs more than it saves."""


def rope_frequencies(width: int, base: float, scaling: RopeScalingConfig | None = None) -> Tensor:
    """Return the rotary frequencies base^(-2p/width), rescaled, as [width / 2] float32 on the CPU.

    `linear` divides all by `factor`. `llama3` divides those of wavelength above original / low_freq_factor,
    keeps those below original / high_freq_factor, and between the two interpolates linearly in original /
    wavelength. `yarn` keeps those that turn at least `beta_fast` times over the original length, divides those
    that turn at most `beta_slow` times, and between the two interpolates linearly in p, from the whole pair
    below to the whole pair above. `dynamic` changes nothing here: it depends on a forward's length, see
    `RotaryEmbedding`.

    Reference: Su et al., 2021, arXiv:2104.09864; Grattafiori et al., 2024, arXiv:2407.21783; Peng et al., 2023,
    arXiv:2309.00071, section 3.2. Computed in float32, as the checkpoints that use it were trained.
    """
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width
    frequencies = 1.0 / (base**exponents)
    if scaling is None or scaling.type == "dynamic":
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    if scaling.type == "llama3":
        turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    else:
        kept = _yarn_kept(width, base, scaling)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn_kept(width: int, base: float, scaling: RopeScalingConfig) -> Tensor:
    """Return how much of each pair's frequency YaRN keeps, from 1 (fast pairs) to 0 (slow ones)."""

    def pair_of(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(base))

    first = max(math.floor(pair_of(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_of(scaling.beta_slow)), width - 1)
    # A ramp of no width is a step, taken just above `first`.
    length = last - first if last != first else 1e-3
    pairs = torch.arange(width // 2, dtype=torch.float32, device="cpu")
    return 1.0 - ((pairs - first) / length).clamp(0.0, 1.0)


def attention_factor(scaling: RopeScalingConfig | None) -> float:
    """Return what cos and sin are multiplied by: under YaRN 0.1 ln(factor) + 1 unless given, else 1.

    Both query and key carry it, so it sharpens the scores of rotated features by its square, and those of a
    decoupled layer's semantic path only under `rope_semantic`.
    """
    if scaling is None or scaling.type != "yarn":
        return 1.0
    return scaling.attention_factor or 0.1 * math.log(scaling.factor) + 1.0


def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
    """Apply RoPE (rotate-half convention: pair p is features p and p + D/2) and multiply by `scale`.

    Shape: x [B, N, T, D], cos and sin [N or 1, T, D/2] or [B, N or 1, T, D/2]; returns [B, N, T, D] in at least
    float32, or rounded to `dtype`.
    """
    if is_fused("rope", x) and not cos.requires_grad:
        return rope(x, cos, sin, scale, dtype or torch.promote_types(x.dtype, torch.float32))
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        first, second = upcast(x).chunk(2, dim=-1)  # same result, fewer calls
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        pairs = upcast(x).unflatten(-1, (2, -1))
        # The backward of `unbind` is one pass; two views would each pad their gradient to a whole tensor.
        real, imaginary = pairs.unbind(-2)
        rotated_by_90 = torch.stack((-imaginary, real), dim=-2)
        # cos and sin are broadcast over both halves, so that a compiled kernel computes each once per element.
        rotated = (pairs * cos.unsqueeze(-2) + rotated_by_90 * sin.unsqueeze(-2)).flatten(-2)
    rotated = rotated if scale == 1.0 else rotated * scale
    return rotated if dtype is None or dtype == rotated.dtype else rotated.to(dtype)


def apply_rope_halves(halves: Tensor, cos: Tensor, sines: Tensor) -> Tensor:
    """Return `rotate` for features viewed as halves, without gradients.

    Shape: halves [B, N, T, 2, D/2], cos [G, T, 1, D/2], sines (-sin, sin) [G, T, 2, D/2]; returns the shape of halves.
    """
    return (halves * cos).add_(halves.flip(-2).mul_(sines))


class RopeTable:
    """Cached cos and sin [G, S, D/2] of positions 0 to S - 1, shared by layers of equal frequencies."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin
        self._last: tuple[tuple[int, int], tuple[Tensor, Tensor]] | None = None

    def reaches(self, n_tokens: int, device: torch.device) -> bool:
        """True if the table covers `n_tokens` positions on a device."""
        return self.cos.shape[1] >= n_tokens and self.cos.device == device

    def at(self, offset: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of these positions, [G, T, D/2] each."""
        return self.cos.narrow(1, offset, n_tokens), self.sin.narrow(1, offset, n_tokens)

    def halves(self, offset: int, n_tokens: int) -> tuple[Tensor, Tensor]:
        """Return cos [G, T, 1, D/2] and (-sin, sin) [G, T, 2, D/2] of these positions.

        The first layer of a step computes them, the others reuse them.
        """
        key, last = (offset, n_tokens), self._last
        if last is None or last[0] != key:
            cos, sin = self.at(offset, n_tokens)
            last = self._last = (key, (cos.unsqueeze(-2), torch.stack((-sin, sin), dim=-2)))
        return last[1]


class RotaryEmbedding(nn.Module):
    """Rotary position embedding from frequencies in a buffer `inv_freq` [G, D/2], one row per head group.

    The buffer stays float32 whatever the module is cast to, because half precision cannot hold an angle, and
    it is real even in a model built on the meta device. `explicit` puts it into the state dict: surgery
    chooses the frequencies of decoupled attention per key/value head, so they are part of the weights there.

    A `table` of cos and sin, see `share_rope_tables`, is used if it is long enough; results are identical.

    Under `dynamic` a forward of L tokens, L above the original length, multiplies the frequency of pair p by
    s^(-2p / (D - 2)) with s = factor * L / original - (factor - 1), which is the base times s^(D / (D - 2)).
    All its tokens share these frequencies. Cached keys were rotated by those of an earlier length, so a decode cannot
    equal the full forward: tokens beyond the original length must run in one forward, and a forward that continues a
    cache past it is refused.

    Raises:
        ConfigError: a `dynamic` forward that starts behind cached tokens, or holds several documents, and is longer
        than the original length.

    Reference: Emozilla, 2023 (dynamic NTK), as in transformers.
    """

    inv_freq: Tensor

    def __init__(
        self,
        width: int,
        base: float,
        scaling: RopeScalingConfig | None = None,
        *,
        n_groups: int = 1,
        explicit: bool = False,
    ) -> None:
        super().__init__()
        self.base = base
        self.attention_factor = attention_factor(scaling)
        self.dynamic = scaling if scaling is not None and scaling.type == "dynamic" else None
        frequencies = rope_frequencies(width, base, scaling).expand(n_groups, -1).clone()
        self.register_buffer("inv_freq", frequencies, persistent=explicit)
        # Identifies fixed angles: layers of equal key share a table.
        is_fixed = not explicit and self.dynamic is None
        self.key = repr((width, base, scaling, n_groups)) if is_fixed else None
        self.table: tuple[Tensor, Tensor] | None = None
        self.step_table: RopeTable | None = None

    def forward(self, offset: int | Tensor, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin at positions offset to offset + T - 1, each [G, T, D/2] float32.

        An `offset` [B, T] gives every token's position, and cos and sin of [B, G, T, D/2].
        """
        if isinstance(offset, int):
            if offset == 0 and (table := _table_if_covers(self.table, n_tokens, device)) is not None:
                return table[0][:, :n_tokens], table[1][:, :n_tokens]
            if not torch.compiler.is_compiling():
                steps = self.step_table
                if steps is not None and steps.reaches(offset + n_tokens, device):
                    return steps.at(offset, n_tokens)
        if isinstance(offset, Tensor):
            self._refuse_documents(n_tokens)
            shared = None if torch.compiler.is_compiling() else getattr(_own, "angles", None)
            if shared is not None and self.key is not None:
                known = shared.get(self.key)
                if known is None or known[0] is not offset:
                    known = shared[self.key] = (offset, *self._compute_cos_sin(offset, n_tokens, device))
                return known[1:]
        return self._compute_cos_sin(offset, n_tokens, device)

    def _compute_cos_sin(self, offset: int | Tensor, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor]:
        frequencies = self.inv_freq.to(device)
        if isinstance(offset, Tensor):
            angles = offset.to(torch.float32)[:, None, :, None] * frequencies[:, None, :]
        elif (
            n_tokens == 1 and self.dynamic is None
        ):  # a decode step should launch few kernels: one product, no position tensor
            angles = (frequencies * float(offset))[:, None]
        else:
            positions = torch.arange(offset, offset + n_tokens, dtype=torch.float32, device=device)
            if self.dynamic is not None and offset + n_tokens > self.dynamic.original_max_position_embeddings:
                frequencies = frequencies * self._stretch(self.dynamic, offset, n_tokens, device)
            angles = positions[:, None] * frequencies[:, None, :]
        # With kernels, as on a GPU: cos and sin that a compiler fuses into rotations are slower than a table.
        if torch.compiler.is_compiling() and has_kernel("rope", angles) and n_tokens >= MIN_TABLE_TOKENS:
            cos, sin = cos_sin(angles)
        else:
            cos, sin = angles.cos(), angles.sin()
        if self.attention_factor == 1.0:
            return cos, sin
        return cos * self.attention_factor, sin * self.attention_factor

    def cached_cos_sin(self, offset: int, n_tokens: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return the angles for `apply_rope_halves` at these positions, None if no table covers them."""
        table = self.step_table
        if table is None or not table.reaches(offset + n_tokens, device):
            return None
        return table.halves(offset, n_tokens)

    def _refuse_documents(self, n_tokens: int) -> None:
        if self.dynamic is None or n_tokens <= self.dynamic.original_max_position_embeddings:
            return
        raise ConfigError(
            f"rope_scaling: type=dynamic: rows of {n_tokens} tokens of packed documents exceed "
            f"original_max_position_embeddings={self.dynamic.original_max_position_embeddings}, and each document "
            "would need frequencies of its own; use a block_size within it, or type: yarn"
        )

    def _stretch(self, scaling: RopeScalingConfig, offset: int, n_tokens: int, device: torch.device) -> Tensor:
        original, end = scaling.original_max_position_embeddings, offset + n_tokens
        if offset > 0:
            raise ConfigError(
                f"rope_scaling: type=dynamic: {n_tokens} tokens after {offset} cached reach {end}, beyond "
                f"original_max_position_embeddings={original}, where the frequencies depend on the whole length "
                "and cached keys no longer fit; keep generations within it, run the tokens in one forward, or use "
                "type: yarn"
            )
        pairs = torch.arange(self.inv_freq.shape[1], dtype=torch.float32, device=device)
        # With one pair its frequency is 1 whatever the base.
        widest = max(len(pairs) - 1, 1)
        return (scaling.factor * end / original - (scaling.factor - 1)) ** (-pairs / widest)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        source = self.inv_freq
        super()._apply(fn, recurse)
        # Follow the device that `fn` chose, never its dtype; and never lose the values to `to("meta")` or
        # `to_empty`.
        target = source.device if self.inv_freq.is_meta else self.inv_freq.device
        self.inv_freq = source.to(target)
        return self

    def extra_repr(self) -> str:
        groups, pairs = self.inv_freq.shape
        return f"{groups} x {pairs} frequencies"


def share_frequencies(ropes: Sequence[RotaryEmbedding]) -> bool:
    """True if `angles_of` supports these embeddings: equal shapes, frequencies that are weights, unmodified class.

    Tensor parallelism changes the class: a rank has the angles of its own heads only.
    """
    kinds = {(rope.inv_freq.shape, rope.attention_factor, rope.key, rope.dynamic is None) for rope in ropes}
    return (
        len(kinds) == 1
        and ropes[0].key is None
        and ropes[0].dynamic is None
        and all(type(rope) is RotaryEmbedding for rope in ropes)
    )


def angles_of(ropes: Sequence[RotaryEmbedding], offset: Tensor) -> dict[Hashable, tuple[Tensor, Tensor]]:
    """Return cos and sin of embeddings for which `share_frequencies` holds, each as `forward` returns it.

    Otherwise a decode step launches kernels for each layer's angles.

    Shape: offset [B, T] to [B, G, T, D/2] each.
    """
    # One op: a compiler would make a kernel of every part.
    cos, sin = rope_cos_sin(offset, torch.stack([rope.inv_freq.to(offset.device) for rope in ropes]))
    if (factor := ropes[0].attention_factor) != 1.0:
        cos, sin = cos * factor, sin * factor
    return {rope: (cos[index], sin[index]) for index, rope in enumerate(ropes)}


def _table_if_covers(
    table: tuple[Tensor, Tensor] | None, n_tokens: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return the table if it covers `n_tokens` positions on a device, else None."""
    if table is None or table[0].shape[1] < n_tokens or table[0].device != device:
        return None
    return table


_own = threading.local()


@contextmanager
def shared_angles() -> Iterator[None]:
    """Compute angles of per-token positions once for all layers of equal frequencies.

    Applies to eager forwards of this thread; otherwise each layer launches four kernels for them.
    """
    before, _own.angles = getattr(_own, "angles", None), {}
    try:
        yield
    finally:
        _own.angles = before


@torch.no_grad()
def share_rope_tables(module: nn.Module, n_tokens: int, device: torch.device, *, for_steps: bool = False) -> None:
    """Set a shared cos/sin table of positions 0 to T - 1 on all rotary embeddings with fixed angles.

    A compiler would otherwise recompute both functions in every layer, for every element of every head and batch,
    forward and backward, which is slower than reading a table; eager layers save launches. `for_steps` sets a separate
    table for forwards after cached tokens, so its length does not change a compiled forward.
    """
    tables: dict[str, Any] = {}
    for rotary in module.modules():
        if not isinstance(rotary, RotaryEmbedding) or rotary.key is None:
            continue
        if for_steps:
            present = rotary.step_table
            if rotary.key not in tables:
                is_enough = present is not None and present.reaches(n_tokens, device)
                tables[rotary.key] = present if is_enough else RopeTable(*rotary(0, n_tokens, device))
            rotary.step_table = tables[rotary.key]
            continue
        if rotary.key not in tables:
            rotary.table = _table_if_covers(rotary.table, n_tokens, device)
            tables[rotary.key] = rotary.table or rotary(0, n_tokens, device)
        rotary.table = tables[rotary.key]
