"""Loss of each position in spread held-out windows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from caramba.data import IGNORED, TokenDataset, batches, documents_of, spread_windows
from caramba.infer.agreement import CHUNK
from caramba.model import Model
from caramba.ops.backend import upcast
from caramba.runtime.device import wide_dtype


@torch.inference_mode()
def position_nll(
    model: Model, windows: TokenDataset, n_windows: int, batch_size: int, device: torch.device
) -> Tensor:
    """Return the NLL in nats of each target of up to `n_windows` windows, NaN where a target does not count.

    Shape: [windows, T], float64 on the CPU. Logits exist for 1024 tokens at a time.
    """
    losses: list[Tensor] = []
    for batch in batches(windows, spread_windows(len(windows), n_windows), batch_size):
        x, y = batch[0].to(device), batch[1].to(device)
        documents = documents_of(batch)
        hidden = model.hidden(x, documents=None if documents is None else documents.to(device)).flatten(0, 1)
        found = [
            F.cross_entropy(
                upcast(model.logits(hidden[start : start + CHUNK])),
                y.flatten()[start : start + CHUNK],
                reduction="none",
                ignore_index=IGNORED,
            )
            for start in range(0, len(hidden), CHUNK)
        ]
        rows = torch.cat(found).view(y.shape).to(wide_dtype(y.device))
        losses += list(torch.where(y == IGNORED, torch.nan, rows).cpu().double())
    return torch.stack(losses)
