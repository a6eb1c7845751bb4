"""Names of a package that load their module on first use, so that importing one module loads no others."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(package: str, file: str) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package: names load by the imports that its file has `if TYPE_CHECKING`.

    They are its `__all__`, unless it has one. No name may be that of a module of the package, since importing that
    module would replace it. The file is parsed when a name is first asked for, not when the package is imported.

    Args:
        package: the package's `__name__`.
        file: the package's `__file__`.
    """

    @functools.cache
    def module_of() -> dict[str, str]:
        import ast  # for a package whose names are asked for

        guard = next(node for node in ast.parse(Path(file).read_bytes()).body if isinstance(node, ast.If))
        imports = [node for node in guard.body if isinstance(node, ast.ImportFrom)]
        return {item.name: str(node.module) for node in imports for item in node.names}

    def find(name: str) -> Any:
        if name == "__all__":
            value: Any = sorted(module_of())
        elif name in module_of():
            value = getattr(importlib.import_module(module_of()[name]), name)
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return find
