"""The op `caramba::prompt_lookup_step`: what a verified round keeps of its drafts, and the drafts of the next one."""

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct

SIZE, LAST, DRAFTS = 0, 1, 2
"""Columns of `state`: the matched tokens behind the drafts, the text's last token, and where the drafts begin."""


def prompt_lookup_step(
    ids: Tensor,
    lengths: Tensor,
    state: Tensor,
    sampled: Tensor,
    live: Tensor,
    most: int,
    max_ngram: int,
    extra: bool = True,
) -> Tensor:
    """Accept drafts of prompt-lookup speculation, look up the next drafts, and return the accepted counts.

    Each row keeps its sampled tokens up to and with the first that differs from its draft.

    The forward before this step had inputs `state[b, 1:1 + T]`: the last token of row b and T - 1 drafts.
    `sampled[b, i]` is the token sampled after the i-th input, and `lengths[b]` includes those T tokens. The row's text
    is `ids[b, :lengths[b] - T + 1]`. Of its drafts min(most, T - 1) count, none where state[b, 0] is 0. The step
    appends to the text of a live row its sampled tokens up to and with the first that differs from its draft, or all
    and one more (without `extra`, all). `lengths` becomes the text's length less 1.

    The next drafts are the tokens after the last earlier occurrence of the text's last tokens, for the longest n-gram
    of at most `max_ngram`: state[b, 0] is the length of that n-gram (0: no match), state[b, 1] the last token,
    state[b, 2:] the drafts. A continuation that reaches the end of the text repeats from its start.

    Shape: ids [B, N] int64, lengths [B] int32, state [B, 2 + K] int64, sampled [B, T] int64 with T at most 1 + K, live
    [B] bool, to [B] int64. N has room for T tokens after every text. ids, lengths and state are changed in place.

    Raises:
        ConfigError: an argument of another shape, dtype or device, or one that is not contiguous.

    Reference: Saxena, 2023, prompt lookup decoding.
    """
    n_rows = ids.shape[0] if ids.dim() else 0
    n_ids, n_state, n_sampled = (x.shape[-1] if x.dim() else 0 for x in (ids, state, sampled))
    shapes = {
        "ids": (ids, torch.int64, (n_rows, n_ids)),
        "lengths": (lengths, torch.int32, (n_rows,)),
        "state": (state, torch.int64, (n_rows, max(n_state, DRAFTS + 1))),
        "sampled": (sampled, torch.int64, (n_rows, min(max(n_sampled, 1), n_state - 1))),
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
        raise ConfigError(f"prompt_lookup_step: got most={most} and max_ngram={max_ngram}, expected >= 0 and >= 1")
    run = direct("prompt_lookup_step", ids) or torch.ops.caramba.prompt_lookup_step.default
    return run(ids, lengths, state, sampled, live, most, max_ngram, extra)


@caramba_op(
    "prompt_lookup_step",
    fake=lambda ids, *_: ids.new_empty(ids.shape[:1]),
    mutates=("ids", "lengths", "state"),
)
def reference_prompt_lookup_step(
    ids: Tensor,
    lengths: Tensor,
    state: Tensor,
    sampled: Tensor,
    live: Tensor,
    most: int,
    max_ngram: int,
    extra: bool,
) -> Tensor:
    """Compute the op in plain PyTorch, without a wait for the device."""
    width, n_ids, device = sampled.shape[1], ids.shape[1], ids.device
    before = lengths.long() - width + 1
    place = torch.arange(width - 1, device=device)
    counts = torch.where(state[:, SIZE] > 0, min(most, width - 1), 0)
    fits = (state[:, DRAFTS : DRAFTS + width - 1] == sampled[:, :-1]) & (place < counts[:, None])
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
    ids.scatter_(1, at, torch.where(is_kept, sampled, ids.gather(1, at)))
    length = before + kept
    lengths.copy_(length - 1)

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
