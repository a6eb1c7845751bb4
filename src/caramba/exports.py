"""Names of a package that load their module on first use, so that importing one module loads no others."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, homes: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
        package: the package's `__name__`.
        homes: names by the module that defines them. A module outside the package is given in full, and no name may be
            that of a module of the package, since importing that module would replace it.
    """
    module_of = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> Any:
        home = module_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = home if home.startswith("caramba.") else f"{package}.{home}"
        value = getattr(importlib.import_module(path), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
