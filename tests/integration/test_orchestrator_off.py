"""With the orchestrator off a run is as it would be without one: modules, callbacks, files and weights.

tests/golden has losses of before there was one, and tests/unit/train/test_orchestration_waits.py counts operators.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.commands import SMALL, environment, leave_blank

ROOT = Path(__file__).parents[2]
WORDS = ("model=tiny", "train=pretrain", "train.steps=12", "device=cpu", "plan=off", "resume=never")
NONE = (
    "benchmark=none",
    "verify=none",
    "logger.tensorboard=false",
    "train.batch_size=2",
    "train.block_size=16",
)
ON = (
    *("train.orchestrator_enabled=true", "train.orchestrator_strategies=[conservative_adamw]"),
    "train.orchestrator_decision_interval=4",
)


def seen(*words: str) -> dict[str, Any]:
    """Launch in this process; return the callbacks and optimiser of its trainer, files, weights and modules loaded."""
    import lightning.pytorch as pl

    import caramba
    from caramba.artifacts import style

    found: dict[str, Any] = {}

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            found["optimizer"] = type(trainer.optimizers[0]).__name__
            found["guard"] = pl_module.guard is not None

    def recorded(self: Any, *arguments: Any, **keys: Any) -> None:
        found["callbacks"] = [type(one).__name__ for one in self.callbacks]
        self.callbacks.append(Look())
        fit(self, *arguments, **keys)

    style._saved = leave_blank  # no figure is looked at
    fit, pl.Trainer.fit = pl.Trainer.fit, recorded
    try:
        run = caramba.launch([*WORDS, *NONE, *SMALL, *words], quiet=True)
    finally:
        pl.Trainer.fit = fit
    files = sorted(str(file.relative_to(run.path)) for file in run.path.rglob("*") if file.is_file())
    kinds = ("orchestrat", "portfolio", "strategy_clip", "handover", "nowcast")
    return {
        **found,
        "files": files,
        "weights": {
            name: hashlib.sha256((run.path / name).read_bytes()).hexdigest()
            for name in files
            if name.endswith(".safetensors")
        },
        "modules": [name for name in sys.modules if any(kind in name for kind in kinds)],
    }


@pytest.mark.slow
def test_off_has_no_part_of_the_orchestrator_and_on_with_adamw_alone_adds_its_record(
    tmp_path: Path, cache: Path
) -> None:
    """All in one fresh process, the plain run first, so that what is loaded is the run's own."""
    command = [sys.executable, "-m", "tests.integration.test_orchestrator_off"]
    variables = {**environment(cache), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    plain, off, on = json.loads(done.stdout.splitlines()[-1])
    assert plain["modules"] == off["modules"] == []
    assert plain["callbacks"] == off["callbacks"]
    assert [one for one in on["callbacks"] if one != "Orchestration"] == plain["callbacks"] != on["callbacks"]
    assert (plain["optimizer"], off["optimizer"], on["optimizer"]) == ("AdamW", "AdamW", "Portfolio")
    assert (plain["guard"], off["guard"], on["guard"]) == (False, False, True)
    assert plain["files"] == off["files"] == [name for name in on["files"] if name != "decisions.jsonl"]
    assert "decisions.jsonl" in on["files"]
    assert plain["weights"] == off["weights"] == on["weights"] != {}


if __name__ == "__main__":
    runs = [seen(), seen("train.orchestrator_enabled=false"), seen(*ON)]
    print(json.dumps(runs))
