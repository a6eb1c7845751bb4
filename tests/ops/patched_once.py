"""A plugin of pytest for processes that interpret kernels: what Triton's interpreter does anew at each operation, done once.

Arrays of the tests are small, so that most of their time is what it spends around an operation: it looks through all
names of the language at each call of a kernel's own functions, and finds what the launch has changed already; it makes a
table of all types to look up one, and describes the shape of each result in four objects.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from triton.language import core
from triton.runtime import interpreter

_patch = interpreter._patch_lang
_modules: set[str] = set()
"""Modules whose names of the language are changed until the launch ends."""


def _patch_once(function: Callable[..., Any]) -> Any:
    if function.__module__ in _modules:
        return None
    _modules.add(function.__module__)
    scope = _patch(function)
    restore = scope.restore

    def restore_all() -> None:  # called at the end of a launch alone
        _modules.clear()
        restore()

    scope.restore = restore_all
    return scope


def _hash_by_name(self: core.dtype) -> int:
    return hash(self.name)


_block_type: Any = functools.lru_cache(maxsize=4096)(core.block_type)
_numpy_type = functools.lru_cache(maxsize=4096)(interpreter._get_np_dtype)


def _with_element_ty(self: core.block_type, scalar_ty: core.dtype) -> core.block_type:
    return _block_type(scalar_ty, self.shape)


def _get_np_dtype(type: core.dtype) -> Any:
    return _numpy_type(type.scalar)


@functools.lru_cache(maxsize=4096)
def _described(shape: tuple[int, ...]) -> tuple[core.tuple, core.constexpr]:
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _init(self: core.tensor, handle: Any, type: core.dtype) -> None:
    """Be `core.tensor.__init__` with one description for all tensors of a shape, which nothing changes."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _described(tuple(type.shape) if type.is_block() else ())


interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _get_np_dtype
core.pointer_type.__hash__ = core.block_type.__hash__ = _hash_by_name
core.block_type.with_element_ty = _with_element_ty
core.tensor.__init__ = _init
