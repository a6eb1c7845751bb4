"""Check that a schema's `target` names a class. The source is read, so that no torch is loaded for it."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
from pathlib import Path
from typing import Any

from caramba.config.extension import ExtensionConfig
from caramba.config.names import nearest
from caramba.config.node import NodeConfig
from caramba.config.plugin_import import is_installed
from caramba.config.plugin_loader import load_from_source
from caramba.config.user_traceback import shown, user_traceback
from caramba.errors import ConfigError

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_target(schema: type[NodeConfig], place: str) -> None:
    """Check that the module of a target exists and that its source defines the class.

    Whether that is a torch module is known for sure when it is imported, with the model; what cannot be one, a
    function, a value, a class without a base, is refused here.

    Raises:
        ConfigError: naming the target, and the nearest name where there is one.
    """
    target: Any = schema.target
    name = f"{schema.__name__}.target={target!r}"
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        raise ConfigError(f"{name} is not 'module:Class', such as 'my_pkg.layers_impl:MyLayer' ({place})")
    module, _, wanted = target.partition(":")
    _read_own_source(module.partition(".")[0])
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    except Exception as error:  # a package that the module is in runs when it is looked for
        raise ConfigError(
            f"{name}: {module} cannot be looked for: {user_traceback(error)} ({place})"
        ) from error
    if spec is None:
        raise ConfigError(f"{name}: there is no module {module}; correct the target ({place})")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled: there is no source to read
    file = Path(spec.origin)
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{name}: {shown(file)} is not Python: {user_traceback(error)} ({place})"
        ) from error
    names = _names(tree.body)
    if "*" in names and wanted not in names:
        return
    if wanted not in names:
        raise ConfigError(
            f"{name}: {shown(file)} has no {wanted}{nearest(wanted, names) or ';'} correct the target ({place})"
        )
    found = names[wanted]
    if issubclass(schema, ExtensionConfig):
        problem = _signature_problem(found, schema)
        if problem is not None:
            raise ConfigError(
                f"{name} {problem} ({shown(file)}:{found.lineno}); expected {schema.signature()} ({place})"
            )
        return
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) or _has_no_base(found):
        what = "a class without a base" if isinstance(found, ast.ClassDef) else "a function"
        raise ConfigError(
            f"{name} is {what} ({shown(file)}:{found.lineno}), expected a subclass of torch.nn.Module ({place})"
        )


def _signature_problem(node: ast.stmt, schema: type[ExtensionConfig]) -> str | None:
    """Return how the source of an extension's target differs from its kind; methods of other files are not read."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "is a function"
    if not isinstance(node, ast.ClassDef):
        return None
    if schema.base is not None and _has_no_base(node):
        return "is a class without a base"
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    for method, wanted in schema.methods.items():
        if method in own:
            arguments = own[method].args
            given = [item.arg for item in (*arguments.posonlyargs, *arguments.args)][1:]
            required = len(given) - len(arguments.defaults)
            if (len(given) < len(wanted) and arguments.vararg is None) or required > len(wanted):
                return f"has {method}({', '.join(('self', *given))})"
        elif not node.bases and not node.decorator_list:
            return f"has no {method}"
    return None


def _read_own_source(top: str) -> None:
    """Have a target's package read from source as its schema's is, unless it is another one that is installed."""
    with contextlib.suppress(ImportError, ValueError):  # which the search for the target tells
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            return
        if not any(is_installed(folder) for folder in Path(spec.origin).parents):
            load_from_source(top, None)


def _has_no_base(node: ast.stmt) -> bool:
    """Whether a statement is a class that is made from nothing but `object`."""
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords:
        return False
    return all(isinstance(base, ast.Name) and base.id == "object" for base in node.bases)


def _names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return what a module's statements bind, by name; `*` where an import brings names that only it knows."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(item.asname or item.name).partition(".")[0]: node for item in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                item.id: node for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)
            }
        elif isinstance(node, ast.If | ast.Try | ast.With):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                found |= _names(part)
    return found
