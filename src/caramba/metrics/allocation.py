"""Peak bytes of tensors that a piece of code allocates, counted from storages on any device."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class AllocationMeter(TorchDispatchMode):
    """Counts live and peak bytes of storages created inside the context.

    Memory that an operator uses and frees within itself is not seen, so the peak is a lower bound of the allocator's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {id_of(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device.type != "meta"
                and id_of(tensor) not in inputs
            ):
                self._track(tensor.untyped_storage())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()

        def release(_: object) -> None:
            self.live -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, release)
        self.live += size
        self.peak = max(self.peak, self.live)


def id_of(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage, which views share."""
    return tensor.untyped_storage()._cdata
