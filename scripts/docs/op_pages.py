"""Reference page of every op: its functions, its schemas, and the backends that have a kernel for it."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType

import torch
from markdown_cells import cell, code, heading, table

import caramba.ops

BACKENDS = ("triton", "cuda", "metal")
SCHEMA_NAME = re.compile(r'"caramba::(\w+)"')


def op_modules() -> dict[str, ModuleType]:
    """Return the modules under `caramba.ops` that define an op."""
    functions = [getattr(caramba.ops, name) for name in caramba.ops.__all__]
    modules = {inspect.getmodule(item) for item in functions if inspect.isfunction(item)}
    found = {
        module.__name__.rpartition(".")[2]: module for module in modules if module and schemas_of(module)
    }
    return dict(sorted(found.items()))


def schemas_of(module: ModuleType) -> list[str]:
    """Return the ops that a module defines, as `torch.ops.caramba` shows them."""
    names = dict.fromkeys(SCHEMA_NAME.findall(inspect.getsource(module)))
    known = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("caramba::")
    }
    return [str(getattr(torch.ops.caramba, name).default._schema) for name in names if name in known]


def public_functions(module: ModuleType) -> dict[str, str]:
    """Return {signature: summary} of the functions of a module that `caramba.ops` exports."""
    found = {}
    for name in caramba.ops.__all__:
        item = getattr(caramba.ops, name)
        if inspect.isfunction(item) and item.__module__ == module.__name__:
            summary = (inspect.getdoc(item) or "").partition("\n")[0].rstrip(":.")
            found[f"{name}({', '.join(inspect.signature(item).parameters)})"] = summary
    return found


def page() -> str:
    """Return the page of ops."""
    launchers = {name: _launchers(name) for name in BACKENDS}
    lines = [
        "# Ops",
        "",
        "Every op has a reference in PyTorch. `caramba doctor` shows which implementation runs on a machine.",
        "",
    ]
    for name, module in op_modules().items():
        schemas = schemas_of(module)
        ops = {schema.partition("::")[2].partition("(")[0] for schema in schemas}
        kernels = [backend for backend, found in launchers.items() if ops & found]
        rows = [[code(call), cell(text)] for call, text in public_functions(module).items()]
        lines += [*heading(name, name), *table(["function", "meaning"], rows)]
        lines += [f"Kernels: {', '.join(kernels) if kernels else 'none; the reference runs'}.", ""]
        lines += ["```text", *schemas, "```", ""]
    return "\n".join(lines)


def _launchers(backend: str) -> set[str]:
    """Return the ops that a backend has a launcher for, on any machine."""
    try:
        package = importlib.import_module(f"caramba.kernels.{backend}")
    except ImportError:
        return set()
    return set(getattr(package, "LAUNCHERS", {}))
