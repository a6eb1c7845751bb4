"""Signatures of tensors (all but their addresses), and a cache of launches by the signatures of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

MOST_FORMS = 1024  # what is kept for forms that are looked up
MOST_SEEN = 16  # signatures per call that are compared one by one

Made = TypeVar("Made")


def dtype_of(x: Tensor | None) -> torch.dtype | None:
    """Return the dtype of a tensor that may not be there."""
    return None if x is None else x.dtype


def tensor_signature(x: Tensor) -> tuple[Any, ...]:
    """Return all properties of a tensor that a launch depends on, except its address."""
    return x.shape, x.stride(), x.dtype, x.get_device()


class LaunchCache(Generic[Made]):
    """Launches by the signatures of their tensors and by other arguments.

    Asking every tensor for its signature takes longer than a launch, so later look-ups use torch's own
    check of a call's tensors against those of an earlier one, a single call for all of them: same types, devices,
    dtypes, sizes and strides, and whether they need gradients. It holds no tensor. If it fails, as for one tensor
    passed twice, the signatures are looked up; it never accepts other signatures.
    """

    def __init__(self) -> None:
        self.by_form: dict[Hashable, Made] = {}
        self.seen: dict[Hashable, list[tuple[Callable[..., bool], Made]]] = {}

    def get(self, rest: Hashable, tensors: Sequence[Tensor]) -> Made | None:
        """Return the entry for tensors of these signatures and an equal `rest`, which implies their count."""
        for check, made in self.seen.get(rest, ()):
            if check(*tensors):
                return made
        made = self.by_form.get((rest, *map(tensor_signature, tensors)))
        if made is not None:
            self._see(rest, tensors, made)
        return made

    def add(self, rest: Hashable, tensors: Sequence[Tensor], made: Made) -> None:
        """Keep what was made for tensors of these forms."""
        if len(self.by_form) >= MOST_FORMS:
            self.clear()
        self.by_form[rest, *map(tensor_signature, tensors)] = made
        self._see(rest, tensors, made)

    def clear(self) -> None:
        """Forget everything."""
        self.by_form.clear()
        self.seen.clear()

    def _see(self, rest: Hashable, tensors: Sequence[Tensor], made: Made) -> None:
        guards: Any = TensorGuards  # its declaration lacks the tensors
        check = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        if not check(*tensors):  # one is given twice, which it never takes
            return
        if len(self.seen) >= MOST_FORMS:
            self.seen.clear()
        # A new list, as another thread may go through the old one. What was seen last is asked first.
        self.seen[rest] = [(check, made), *self.seen.get(rest, ())[: MOST_SEEN - 1]]
