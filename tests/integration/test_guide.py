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

    def test(self, *words: str, **variables: str) -> str:
        return self.python("-m", "pytest", "-n0", "-p", "no:cacheprovider", *words, **variables)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    return Clone(tmp_path_factory.mktemp("clone"))


def test_add_a_layer_recipe_builds_and_trains_a_model(clone: Clone) -> None:
    names = clone.follow("Add a layer")
    assert len(names) == 3
    said = clone.python("-c", PROBE)
    assert said.strip() == f"{clone.root}/src/caramba/__init__.py torch.Size([8])"
    assert "1 passed" in clone.test(names[-1])


def test_add_a_topology_recipe_passes_its_test(clone: Clone) -> None:
    names = clone.follow("Add a topology")
    assert len(names) == 3
    assert "1 passed" in clone.test(names[-1])


def test_add_an_op_recipe_passes_its_tests_and_compiles(clone: Clone) -> None:
    pytest.importorskip("triton")
    cases = "tests/ops/kernel_cases.py"
    names = clone.follow(
        "Add an op",
        {
            cases: '    forward, backward = ("_forward_kernel",), ("_backward_kernel",)\n    for name, dtype in (("bf16", BF16), ("fp32", F32)):\n        x, packed'
        },
    )
    assert len(names) == 4
    assert "5 passed" in clone.test(names[2], TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    chosen = "square or every_launcher"
    assert "2 passed" in clone.test("tests/ops/test_kernels_compile.py", "-k", chosen, TRITON_INTERPRET="0")


def test_add_an_experiment_recipe_prints_a_plan(clone: Clone) -> None:
    assert len(clone.follow("Add an experiment")) == 1
    said = clone.python("-m", "caramba", "compile", "experiment=narrow", "--print-plan")
    assert "tiny_dba" in said


def test_add_a_benchmark_recipe_measures_a_model(clone: Clone) -> None:
    schemas = "src/caramba/config/benchmark.py"
    names = clone.follow("Add a benchmark", {schemas: "BenchmarkKind = Annotated["})
    assert len(names) == 4
    text = (clone.root / schemas).read_text()
    (clone.root / schemas).write_text(
        text.replace(
            "    | GenerationBenchmarkConfig,",
            "    | GenerationBenchmarkConfig\n    | EntropyBenchmarkConfig,",
        )
    )
    assert "1 passed" in clone.test(names[-1])
    said = clone.python(
        "-m", "caramba", "compile", "model=tiny", "train=pretrain", "benchmark=entropy", "--print-plan"
    )
    assert "entropy" in said


def test_add_a_benchmark_script_recipe_writes_its_file(clone: Clone, tmp_path: Path) -> None:
    assert len(clone.follow("Add a benchmark script")) == 1
    out = tmp_path / "product.json"
    clone.python("scripts/bench/run.py", "product", "--width", "16", "--repeats", "2", "--out", str(out))
    data = json.loads(out.read_text())
    assert data["benchmark"] == "product"
    assert data["rows"][0]["side"] == "product"
    assert data["rows"][0]["median_ms"] > 0
