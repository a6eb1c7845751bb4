"""CONTRIBUTING's recipes work when they are followed literally in a copy of the sources."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
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


def blocks_of(heading: str) -> list[str]:
    section = GUIDE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


def run_python(words: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_add_a_layer_recipe_builds_and_trains_a_model(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    schema, module = blocks_of("Add a layer")
    with (tmp_path / "src/caramba/config/layer.py").open("a") as file:
        file.write(f"\n\n{schema}")
    (tmp_path / "src/caramba/layer/foo.py").write_text(module)
    said = run_python(["-c", PROBE], tmp_path, PYTHONPATH=str(tmp_path / "src"))
    assert said.strip() == f"{tmp_path}/src/caramba/__init__.py torch.Size([8])"


def test_add_a_benchmark_script_recipe_writes_its_file(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "scripts" / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("__pycache__")
    )
    (case,) = blocks_of("Add a benchmark script")
    (tmp_path / "bench/cases/product.py").write_text(case)
    out = tmp_path / "product.json"
    run_python(["bench/run.py", "product", "--width", "16", "--repeats", "2", "--out", str(out)], tmp_path)
    data = json.loads(out.read_text())
    assert data["benchmark"] == "product"
    assert data["rows"][0]["side"] == "product"
    assert data["rows"][0]["median_ms"] > 0
