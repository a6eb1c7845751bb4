"""Several documents in one row of tokens: which keys a query may see, and positions that start again."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from caramba.cache import LayerCache
from caramba.errors import ConfigError
from caramba.layer.score import active_kernel
from caramba.ops.dba_append import store_tokens


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

    @property
    def offset(self) -> Tensor:
        """Position of every token, [B, T]."""
        return self.positions

    @classmethod
    def of(cls, ids: Tensor) -> "Documents":
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

    def kept(self, streams: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the streams of an attention application, [B, K, T, D] each, as they are attended to."""
        return streams


@dataclass(frozen=True, eq=False)
class StoredDocuments(Documents):
    """Documents of one row of tokens whose streams go to rows of caches: a forward over whole prompts fills them.

    Attributes:
        rows: of the caches, where each token goes, int64 [T]; its place there is its position.
        caches: of the attention applications that have not run, in execution order.
    """

    rows: Tensor = field(kw_only=True)
    caches: Iterator[LayerCache] = field(kw_only=True)

    @classmethod
    def packed(
        cls, starts: Tensor, rows: Tensor, n_tokens: int, most: int, caches: Sequence[LayerCache]
    ) -> "StoredDocuments":
        """Return documents of exact caches by where they begin and the rows that they fill.

        Documents may be empty. Tokens beyond the `most` that a row holds go to its last place.

        Shape: starts int64 [N + 1], the last T, rows int64 [N].
        """
        places = torch.arange(n_tokens, device=starts.device)
        document = torch.searchsorted(starts[1:], places, right=True)
        first = starts[document]
        positions = (places - first).clamp(max=most - 1)
        return cls(first[None], positions[None], starts.to(torch.int32), rows=rows[document], caches=iter(caches))

    def kept(self, streams: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Store the streams of the next attention application; return them in the cache's dtype.

        Raises:
            ConfigError: more attention applications than caches.
        """
        cache = next(self.caches, None)
        if cache is None:
            raise ConfigError(
                "context: an attention application has no cache; make the context with this model's new_context()"
            )
        # An exact cache has one dtype, whether its streams have separate buffers or share one.
        into = cache.allocations
        stored = {name: streams[name].to(into[0].dtype) for name in cache.names}
        store_tokens(list(stored.values()), into, self.rows, self.positions[0])
        return stored
