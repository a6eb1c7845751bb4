"""The op `caramba::lookup_round`: what a verified round keeps of its drafts, and the drafts of the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import direct

torch.library.define(
    "caramba::lookup_round",
    "(Tensor(a!) ids, Tensor(b!) held, Tensor(c!) state, Tensor drawn, Tensor live, int most, int max_ngram, "
    "bool extra) -> Tensor",
)

SIZE, LAST, DRAFTS = 0, 1, 2
"""Columns of `state`: the matched tokens behind the drafts, the text's last token, and where the drafts begin."""


def prompt_lookup_step(
    ids: Tensor,
    held: Tensor,
    state: Tensor,
    drawn: Tensor,
    live: Tensor,
    most: int,
    max_ngram: int,
    extra: bool = True,
) -> Tensor:
    """Keep the drawn tokens of each row up to the first that is not its draft, look the next drafts up, and return how
    many tokens were kept.

    A round fed row b `state[b, 1:1 + T]`, its last token and T - 1 drafts; `drawn[b, i]` is what the model then drew
    behind the i-th, and `held[b]` counts those T tokens. The row's text is `ids[b, :held[b] - T + 1]`. Of its drafts
    min(most, T - 1) count, none where state[b, 0] is 0. What is kept goes behind the text: the drawn tokens up to and
    with the first that differs from its draft, or all and one more (without `extra`, all), nothing of a row that is not
    live. `held` becomes the text's length less 1.

    The next drafts are what followed the last time that the text's last tokens stood in it, of the longest run of at
    most `max_ngram`: state[b, 0] is the length of that run (0: there is none), state[b, 1] the last token,
    state[b, 2:] the drafts; a continuation that reaches the end repeats itself.

    Shape: ids [B, N] int64, held [B] int32, state [B, 2 + K] int64, drawn [B, T] int64 with T at most 1 + K, live [B]
    bool, to [B] int64. N has room for T tokens behind every text; the three first are changed, and are contiguous.

    Raises:
        ConfigError: an argument of another shape, dtype or device, or one that is not contiguous.

    Reference: Saxena, 2023, prompt lookup decoding.
    """
    n_rows = ids.shape[0] if ids.dim() else 0
    n_ids, n_state, n_drawn = (x.shape[-1] if x.dim() else 0 for x in (ids, state, drawn))
    shapes = {
        "ids": (ids, torch.int64, (n_rows, n_ids)),
        "held": (held, torch.int32, (n_rows,)),
        "state": (state, torch.int64, (n_rows, max(n_state, DRAFTS + 1))),
        "drawn": (drawn, torch.int64, (n_rows, min(max(n_drawn, 1), n_state - 1))),
        "live": (live, torch.bool, (n_rows,)),
    }
    for name, (x, dtype, shape) in shapes.items():
        fits = x.dtype == dtype and tuple(x.shape) == shape and x.device == ids.device
        if not fits or not x.is_contiguous():
            raise ConfigError(
                f"prompt_lookup_step: {name}: got {x.dtype} of shape {tuple(x.shape)} on {x.device}"
                f"{'' if x.is_contiguous() else ', not contiguous'}, expected contiguous {dtype} {shape} on "
                f"{ids.device}"
            )
    if most < 0 or max_ngram < 1:
        raise ConfigError(
            f"prompt_lookup_step: got most={most} and max_ngram={max_ngram}, expected >= 0 and >= 1"
        )
    run = direct("lookup_round", ids) or torch.ops.caramba.lookup_round.default
    return run(ids, held, state, drawn, live, most, max_ngram, extra)


def reference_prompt_lookup_step(
    ids: Tensor,
    held: Tensor,
    state: Tensor,
    drawn: Tensor,
    live: Tensor,
    most: int,
    max_ngram: int,
    extra: bool,
) -> Tensor:
    """Compute the op in plain PyTorch, without a wait for the device."""
    width, n_ids, device = drawn.shape[1], ids.shape[1], ids.device
    before = held.long() - width + 1
    place = torch.arange(width - 1, device=device)
    counts = torch.where(state[:, SIZE] > 0, min(most, width - 1), 0)
    fits = (state[:, DRAFTS : DRAFTS + width - 1] == drawn[:, :-1]) & (place < counts[:, None])
    accepted = fits.long().cumprod(1).sum(1)
    kept = accepted + 1
    if not extra:
        kept = torch.where((accepted == counts) & (counts > 0), accepted, kept)
    kept = torch.where(live, kept, 0)
    slots = torch.arange(width, device=device)
    at = before[:, None] + slots
    is_kept = slots < kept[:, None]
    at = at.clamp(max=n_ids - 1)
    # What is not kept is written as it was.
    ids.scatter_(1, at, torch.where(is_kept, drawn, ids.gather(1, at)))
    length = before + kept
    held.copy_(length - 1)

    end = torch.arange(n_ids, device=device)  # of a run, and the place of what followed it
    is_run = (end > 0) & (end < length[:, None])
    run = torch.zeros_like(ids)
    for back in range(1, min(max_ngram, n_ids - 1) + 1):
        last = ids.gather(1, (length - back).clamp(min=0)[:, None])
        shifted = torch.zeros_like(ids)
        shifted[:, back:] = ids[:, :-back]
        is_run = is_run & (end >= back) & (length[:, None] >= back) & (shifted == last)
        run += is_run.long()
    best = (run * n_ids + end).masked_fill(run == 0, 0).amax(1)
    start = best % n_ids
    state[:, SIZE] = best // n_ids
    state[:, LAST] = ids.gather(1, (length - 1)[:, None])[:, 0]
    offset = torch.arange(state.shape[1] - DRAFTS, device=device)
    source = start[:, None] + offset % (length - start)[:, None]
    state[:, DRAFTS:] = torch.where(best[:, None] > 0, ids.gather(1, source), 0)
    return kept


torch.library.impl("caramba::lookup_round", "CompositeExplicitAutograd", reference_prompt_lookup_step)


@torch.library.register_fake("caramba::lookup_round")
def _(
    ids: Tensor,
    held: Tensor,
    state: Tensor,
    drawn: Tensor,
    live: Tensor,
    most: int,
    max_ngram: int,
    extra: bool,
) -> Tensor:
    return ids.new_empty(ids.shape[:1])
