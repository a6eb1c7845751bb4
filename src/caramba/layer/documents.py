"""Several documents in one row of tokens: which keys a query may see, and positions that start again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.errors import ConfigError
from caramba.layer.varlen import active_kernel


@dataclass(frozen=True, eq=False)
class Documents:
    """Where the documents of a batch begin. It takes a context's place in a forward without a cache.

    Attention never crosses a document and positions count from 0 in each, so that a forward over packed rows equals
    one forward per document. It is all that a score op needs to choose its kernel: `first` bounds the keys of each
    query from below, for a mask, and `starts` is what variable-length kernels take. How many documents there are sets
    its shape, so that the host waits for the device once per batch where such a kernel is active.

    Attributes:
        first: place in the row of the first token of each token's document, int64 [B, T].
        positions: place of each token in its document, int64 [B, T].
        starts: where the N documents begin in the B*T tokens of all rows, and B*T, int32 [N + 1]; None where attention
            takes a mask, as inside a graph, see `active_kernel`.
    """

    first: Tensor
    positions: Tensor
    starts: Tensor | None = None

    @classmethod
    def of(cls, ids: Tensor) -> Documents:
        """Read document ids [B, T]: neighbours with equal ids are of one document.

        Ids name nothing else: an id that comes back after another one begins a new document. Padding is a document
        with an id of its own.

        Raises:
            ConfigError: ids that are not integers of [B, T].
        """
        if ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ConfigError(
                f"documents: ids have shape {tuple(ids.shape)} and dtype {ids.dtype}, expected integers [B, T], "
                "equal where tokens are of one document"
            )
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        first = torch.where(begins, places, torch.zeros_like(places)).cummax(dim=1).values
        if active_kernel(ids.device) is None:
            return cls(first, places - first)
        starts = F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=ids.numel()).to(torch.int32)
        return cls(first, places - first, starts)
