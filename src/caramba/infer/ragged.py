"""Forwards of rows that hold different numbers of tokens: one row on any cache, several where a cache allows it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from caramba.cache import Context, DeviceContext
from caramba.infer.step import pad_prompts
from caramba.layer import unplanned_attention
from caramba.model import EarlyExit, Model
from caramba.ops.dba_decode import MAX_QUERIES

Network = Model | EarlyExit
"""What drafts or is drafted for: a model, or the first blocks of one."""


def device_of(network: Network) -> torch.device:
    """Return the device that a network's weights are on."""
    return next(network.embedder.parameters()).device


def prefill_rows(network: Network, texts: Sequence[Sequence[int]], ctx: Context, chunk: int | None = None) -> Tensor:
    """Run texts of any lengths, padded on the right, and return what the head reads after each one's last token.

    Attention is causal: what a row stores of its own tokens does not depend on what fills it up. `chunk` bounds the
    tokens per forward.

    Shape: [B, M].
    """
    lengths = [len(text) for text in texts]
    tokens = pad_prompts(texts)
    found: list[Tensor] = [torch.empty(0)] * len(texts)
    start, device, size = 0, device_of(network), chunk or max(lengths)
    for part in tokens.to(device).split(size, dim=1):
        with unplanned_attention(device, tokens.numel() * size):
            hidden, end = network.hidden(part, ctx), start + part.shape[1]
        for row, length in enumerate(lengths):
            if start < length <= end:
                found[row] = hidden[row, length - 1 - start]
        start = end
    return torch.stack(found)


def forward_ragged(network: Network, tokens: Tensor, ctx: Context | DeviceContext) -> Tensor:
    """Run the next tokens of every row behind its own. Shape: [B, T] int64 to [B, T, M]."""
    if not isinstance(ctx, DeviceContext):
        with unplanned_attention(tokens.device, tokens.numel() * (ctx.position + tokens.shape[1])):
            return network.hidden(tokens, ctx)
    parts = []
    for part in tokens.split(MAX_QUERIES, dim=1):
        ctx.width = part.shape[1]
        parts.append(network.hidden(part, ctx))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def rewind(ctx: Context | DeviceContext, lengths: Sequence[int]) -> None:
    """Forget what every row holds behind a length of its own."""
    if isinstance(ctx, DeviceContext):
        ctx.rewind(lengths)
    else:
        ctx.truncate(*lengths)


def right_pad(rows: Sequence[Sequence[int]], width: int, fill: Sequence[int], device: torch.device) -> Tensor:
    """Return rows of tokens as one tensor, each filled up with a token of its own. Shape: [B, width]."""
    filled = [[*row, *[token] * (width - len(row))] for row, token in zip(rows, fill, strict=True)]
    return torch.tensor(filled, device=device)
