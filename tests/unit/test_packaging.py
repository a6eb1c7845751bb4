"""What is in the repository is in the wheel, and the mapped folders import what they may."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAPPED = {
    "conf": "caramba.conf",
    "kernels/triton": "caramba.kernels.triton",
    "kernels/cuda": "caramba.kernels.cuda",
    "kernels/metal": "caramba.kernels.metal",
}


def declared() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def dotted(folder: Path, base: Path, name: str) -> str:
    return ".".join([name, *folder.relative_to(base).parts])


def test_every_package_is_listed() -> None:
    found = {
        dotted(file.parent, ROOT / "src/caramba", "caramba") for file in (ROOT / "src/caramba").rglob("__init__.py")
    }
    for folder, name in MAPPED.items():
        found |= {dotted(file.parent, ROOT / folder, name) for file in (ROOT / folder).rglob("__init__.py")}
    assert found == set(declared()["packages"])


def test_every_option_lies_in_a_listed_package_and_matches_the_package_data() -> None:
    assert "*.yaml" in declared()["package-data"]["*"]
    options = list((ROOT / "conf").rglob("*.y*ml"))
    assert len(options) > 25
    for option in options:
        assert option.suffix == ".yaml", option
        assert dotted(option.parent, ROOT / "conf", "caramba.conf") in declared()["packages"], option


def test_tables_of_the_kernels_are_package_data() -> None:
    assert "*.json" in declared()["package-data"]["*"]
    tables = {file.name for file in (ROOT / "kernels").rglob("*.json")}
    assert tables == {"dba_decode_table.json", "small_batch_linear_table.json"}


def test_sources_that_are_compiled_on_a_users_machine_are_package_data() -> None:
    sources = {file.suffix for file in (ROOT / "kernels").rglob("*.*")} - {".py", ".pyc", ".json"}
    assert {f"*{suffix}" for suffix in sources} <= set(declared()["package-data"]["*"])
    assert {".cuh", ".metal", ".h"} <= sources


def test_python_files_lie_in_packages() -> None:
    for file in (ROOT / "src/caramba").rglob("*.py"):
        assert (file.parent / "__init__.py").exists(), file


def test_mapped_folders_import_nothing_of_caramba() -> None:
    """The import contracts do not see these folders: kernels import torch, Triton and each other, conf nothing."""
    standard = {"collections", "dataclasses", "functools", "json", "math", "pathlib", "typing"}
    system = {"contextlib", "ctypes", "hashlib", "importlib", "os", "tempfile", "threading", "warnings"}
    for folder, allowed in {
        "conf": set(),
        "kernels/triton": {"torch", "triton", "__future__", *standard},
        "kernels/cuda": {"torch", "__future__", *standard, *system},
        "kernels/metal": {"torch", "__future__", "re", *standard},
    }.items():
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                own = (
                    tuple(f"caramba.kernels.{name}." for name in ("triton", "cuda", "metal"))
                    if folder != "conf"
                    else ()
                )
                names = [name for name in names if not name.startswith(own)]
                assert {name.split(".")[0] for name in names} <= allowed, file


def test_every_launch_is_on_the_device_of_its_tensors() -> None:
    """Triton launches on the current device, whichever the tensors are on."""

    def launches(node: ast.AST) -> list[int]:
        return [
            child.lineno
            for child in ast.walk(node)
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Subscript)
        ]

    n_launches = 0
    for file in (ROOT / "kernels/triton").rglob("*.py"):
        tree, guarded = ast.parse(file.read_text()), set()
        for node in ast.walk(tree):
            if isinstance(node, ast.With) and "cuda.device_of(" in ast.unparse(node.items[0]):
                guarded.update(launches(node))
        assert set(launches(tree)) == guarded, file
        n_launches += len(guarded)
    assert n_launches >= 4  # those of forms that are remembered are one, in launch.py


def test_the_pages_of_figures_are_what_the_json_gives() -> None:
    done = subprocess.run([sys.executable, "scripts/bench/report.py", "--check"], cwd=ROOT)
    assert done.returncode == 0, "docs/benchmarks.md, docs/results.md: run python scripts/bench/report.py"
