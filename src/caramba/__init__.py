"""caramba: a Hydra-composed experiment launcher for research on neural architectures.

The Python API is `launch`, `compile`, `runs`, `load`, `transplant` and `distill`; see docs/python.md. Each is imported
on first use, so that `import caramba` loads nothing else.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_FUNCTIONS = {
    "launch": "caramba.launch.call",
    "compile": "caramba.launch.call",
    "runs": "caramba.artifacts.across_runs.run",
    "load": "caramba.evaluation.loaded",
    "transplant": "caramba.surgery.student",
    "distill": "caramba.distill.loop",
}
_PACKAGES = ("launch", "runs", "distill")
"""Functions that share their name with a package: the package itself is callable."""
__all__ = ["__version__", "compile", "distill", "launch", "load", "runs", "transplant"]


class CallablePackage(ModuleType):
    """A package that is also a function of the API, such as `caramba.launch`.

    A package sets `sys.modules[__name__].__class__ = CallablePackage`.
    """

    def __call__(self, *args: Any, **options: Any) -> Any:
        return _find(self.__name__.removeprefix(f"{__name__}."))(*args, **options)


def _find(name: str) -> Any:
    return getattr(importlib.import_module(_FUNCTIONS[name]), name)


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_FUNCTIONS)}")
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    value = _find(name)
    setattr(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_FUNCTIONS})
