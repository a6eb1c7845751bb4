"""A plugin of pytest for processes that interpret kernels: Triton's language is changed once for a launch.

Triton's interpreter looks through all names of the language at each call of a kernel's own functions, which takes a
fifth of these tests, and finds what the launch has changed already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


interpreter._patch_lang = _patch_once
