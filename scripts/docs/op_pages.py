"""Reference page of every op: its functions, its schemas, and the backends that have a kernel for it."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import torch
from markdown_cells import cell, code, heading, table

from caramba.ops import backend as registry

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
BACKENDS = ("triton", "metal")


def ops_by_module() -> dict[str, list[str]]:
    """Return {module: its ops}, both in order."""
    registry.all_ops()  # imports every module
    found: dict[str, list[str]] = {}
    for name, op in sorted(registry._ops.items()):
        found.setdefault(op.module, []).append(name)
    return dict(sorted(found.items()))


def schema_of(name: str) -> str:
    """Return the schema of an op as `torch.ops.caramba` has it."""
    return str(getattr(torch.ops.caramba, name).default._schema)


def public_functions(module: ModuleType) -> dict[str, str]:
    """Return {call: summary} of the public functions of a module, without its references."""
    found = {}
    for name, item in inspect.getmembers(module, inspect.isfunction):
        if item.__module__ == module.__name__ and not name.startswith(("_", "reference_")):
            summary = (inspect.getdoc(item) or "").partition("\n")[0].rstrip(":.")
            found[f"{name}({', '.join(inspect.signature(item).parameters)})"] = summary
    return found


def kernels_of(module: str, ops: list[str]) -> list[str]:
    """Return the backends that have a launcher for one of the ops, on any machine."""
    stem = module.rpartition(".")[2]
    return [backend for backend in BACKENDS if any(_has_launcher(backend, op, stem) for op in ops)]


def page() -> str:
    """Return the page of ops."""
    lines = [
        "# Ops",
        "",
        "Every op has a reference in PyTorch. `caramba doctor` shows which implementation runs on a machine.",
        "",
    ]
    for name, ops in ops_by_module().items():
        module = importlib.import_module(name)
        stem = name.rpartition(".")[2]
        kernels = kernels_of(name, ops)
        rows = [[code(call), cell(text)] for call, text in public_functions(module).items()]
        lines += [*heading(stem, stem), *table(["function", "meaning"], rows)]
        lines += [f"Kernels: {', '.join(kernels) if kernels else 'none; the reference runs'}.", ""]
        lines += ["```text", *map(schema_of, ops), "```", ""]
    return "\n".join(lines)


def _has_launcher(backend: str, op: str, stem: str) -> bool:
    files = (KERNELS / backend / f"{name}.py" for name in (op, stem))
    return any(file.is_file() and re.search(rf"^def {op}\(", file.read_text(), re.MULTILINE) for file in files)
