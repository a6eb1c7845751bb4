"""What a process loads before it does its work: counted by modules, as seconds depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.commands import SMALL, environment

RARE = {
    *("transformers", "wandb", "torchao", "matplotlib", "h5py", "plotext", "lm_eval", "datasets", "pandas"),
    *("scipy", "peft", "optuna", "triton", "starlette", "uvicorn", "prometheus_client", "litellm"),
}
COMPILER = {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy"}
PROBE = """
import builtins, json, sys
real, asked = builtins.__import__, set()
def record(name, variables=None, *rest, **named):
    importer = (variables or {}).get("__name__", "")
    if importer.startswith("caramba."):
        asked.add(name)
    return real(name, variables, *rest, **named)
builtins.__import__ = record
from caramba.cli import main
assert main(sys.argv[2:]) == 0
with open(sys.argv[1], "w") as file:
    json.dump({"loaded": sorted(sys.modules), "asked": sorted(asked)}, file)
"""


def imported(folder: Path, *words: str) -> tuple[set[str], set[str]]:
    """Run `caramba WORDS` and return the modules that were loaded, and those that caramba itself asked for."""
    found = folder / "found.json"
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(found), *words],
        cwd=folder,
        env=environment(folder / "cache"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    modules = json.loads(found.read_text())
    return set(modules["loaded"]), set(modules["asked"])


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


@pytest.fixture(scope="module", name="trained")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str], set[str]]:
    folder = tmp_path_factory.mktemp("imports")
    words = ("model=tiny", "device=cpu", "train=pretrain", "train.steps=1", "benchmark=none", *SMALL)
    return folder, *imported(folder, "launch", *words)


def test_a_pretraining_asks_for_nothing_that_it_does_not_need(
    trained: tuple[Path, set[str], set[str]],
) -> None:
    _, loaded, asked = trained
    assert {"lightning.pytorch", "caramba.train"} <= loaded
    # Its report draws curves. What Lightning loads of these is its own choice.
    assert roots(asked) & RARE == {"matplotlib"}
    assert not {
        name
        for name in loaded
        if f"{name}.".startswith(
            ("caramba.export.", "caramba.serve.", "caramba.artifacts.across_runs.", "caramba.paper.")
        )
    }


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "latest", "--prompt", "def", "--max-new-tokens", "2", "--device", "cpu"),
        ("export", "latest", "--out", "o"),
    ],
)
def test_reading_a_model_back_needs_neither_lightning_nor_the_compiler(
    trained: tuple[Path, set[str], set[str]], words: tuple[str, ...]
) -> None:
    loaded, asked = imported(trained[0], *words)
    assert "torch" in loaded
    assert not loaded & (COMPILER | {"lightning", "torchmetrics", "hydra", "caramba.train"})
    assert not roots(asked) & RARE
