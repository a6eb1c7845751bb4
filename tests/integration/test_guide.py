"""CONTRIBUTING's recipes work when they are followed literally in a copy of the sources, and touch as few files as said."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
BLOCK = re.compile(r'```\w+ title="([^"]+)"\n(.*?)```', flags=re.DOTALL)
RECIPES: dict[str, dict[str, str]] = {
    "Add a layer": {},
    "Add a topology": {},
    "Add an op": {
        "tests/ops/kernel_cases.py": '    forward, backward = ("_forward_kernel",), ("_backward_kernel",)\n    for name, dtype in (("bf16", BF16), ("fp32", F32)):\n        x, packed'
    },
    "Add a benchmark": {"src/caramba/config/benchmark.py": "BenchmarkKind = Annotated["},
}
PROBE = """
import torch, caramba
from caramba.config.model import ModelConfig
from caramba.config.estimate import check_widths
from caramba.model import build_model
layers = [{"type": "FooLayer", "d_model": 8}, {"type": "RMSNormLayer", "d_model": 8}]
topology = {"type": "StackedTopology", "layers": layers}
tree = {"name": "x", "embedder": {"vocab_size": 16, "d_model": 8}, "topology": topology, "head": {"tied": True}}
config = ModelConfig.model_validate(tree)
check_widths(config)
model = build_model(config, seed=0)
model(torch.arange(4)[None]).sum().backward()
print(caramba.__file__, model.topology.layers[0].weight.grad.shape)
"""


class Clone:
    """A copy of the sources, in which recipes are followed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("src", "kernels", "conf", "tests", "scripts/bench"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        package = root / "src/caramba"  # what an editable install maps
        (package / "conf").symlink_to(root / "conf")
        for backend in ("triton", "cuda", "metal"):
            (package / "kernels" / backend).symlink_to(root / "kernels" / backend)

    def follow(self, heading: str, places: dict[str, str] | None = None) -> list[str]:
        """Write the files of a section, and return their names.

        A block goes to the end of a file that there is, or in front of the text that `places` gives for it.
        """
        section = GUIDE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
        names = []
        for name, text in BLOCK.findall(section):
            file, before = self.root / name, (places or {}).get(name)
            if before is not None:
                assert file.read_text().count(before) == 1, f"{name} has {before!r} once"
                file.write_text(file.read_text().replace(before, f"{text}\n\n{before}"))
            elif file.exists():
                file.write_text(f"{file.read_text()}\n\n{text}")
            else:
                file.write_text(text)
            names.append(name)
        return names

    def python(self, *words: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.root / "src"), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def test(self, *files: str, **variables: str) -> dict[str, int]:
        """Run test files in one process; return how many tests of each passed."""
        said = self.python("-m", "pytest", "-n0", "-vv", "-p", "no:cacheprovider", *files, **variables)
        passed = re.findall(r"^([^:\s]+)::.* PASSED", said, flags=re.MULTILINE)
        return {file: passed.count(file) for file in files if file.endswith(".py")}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module", name="names")
def _names(clone: Clone) -> dict[str, list[str]]:
    """The files of every recipe with a test, followed one after the other."""
    found = {heading: clone.follow(heading, places) for heading, places in RECIPES.items()}
    schemas = clone.root / "src/caramba/config/benchmark.py"
    union = "    | GenerationBenchmarkConfig"
    assert schemas.read_text().count(f"{union},") == 1
    schemas.write_text(schemas.read_text().replace(f"{union},", f"{union}\n    | EntropyBenchmarkConfig,"))
    return found


def test_recipes_pass_their_tests_and_touch_as_few_files_as_said(clone: Clone, names: dict[str, list[str]]) -> None:
    pytest.importorskip("triton")
    assert [len(files) for files in names.values()] == [3, 3, 4, 4]
    layer, topology, op, bench = names.values()
    files = (layer[-1], topology[-1], op[2], bench[-1])
    passed = clone.test(*files, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    assert passed == dict(zip(files, (1, 1, 5, 1), strict=True))


def test_add_a_layer_recipe_builds_and_trains_a_model(clone: Clone, names: dict[str, list[str]]) -> None:
    said = clone.python("-c", PROBE)
    assert said.strip() == f"{clone.root}/src/caramba/__init__.py torch.Size([8])"


def test_add_an_op_recipe_compiles(clone: Clone, names: dict[str, list[str]]) -> None:
    pytest.importorskip("triton")
    compiles = "tests/ops/test_kernels_compile.py"
    chosen = "square or every_launcher"
    assert clone.test(compiles, "-k", chosen, TRITON_INTERPRET="0") == {compiles: 2}


def test_add_an_experiment_recipe_prints_a_plan(clone: Clone) -> None:
    assert len(clone.follow("Add an experiment")) == 1
    said = clone.python("-m", "caramba", "compile", "experiment=narrow", "--print-plan")
    assert "tiny_dba" in said


def test_add_a_benchmark_recipe_is_planned(clone: Clone, names: dict[str, list[str]]) -> None:
    said = clone.python("-m", "caramba", "compile", "model=tiny", "train=pretrain", "benchmark=entropy", "--print-plan")
    assert "entropy" in said


def test_add_a_benchmark_script_recipe_writes_its_file(clone: Clone, tmp_path: Path) -> None:
    assert len(clone.follow("Add a benchmark script")) == 1
    out = tmp_path / "product.json"
    clone.python("scripts/bench/run.py", "product", "--width", "16", "--repeats", "2", "--out", str(out))
    data = json.loads(out.read_text())
    assert data["benchmark"] == "product"
    assert data["rows"][0]["side"] == "product"
    assert data["rows"][0]["median_ms"] > 0
