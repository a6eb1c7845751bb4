"""Callbacks, loggers, losses, optimisers and schedules of plugins: used, frozen, hashed, and refused by name."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import caramba
from caramba.artifacts.across_runs.run import Run
from caramba.config.plugins import activate
from caramba.errors import CarambaError, ConfigError, ExtensionFailedError
from tests.integration.commands import SMALL

pytestmark = pytest.mark.usefixtures("blank_figures")
WORDS = (
    *("model=tiny", "train=pretrain", "train.steps=12", "train.batch_size=2", "train.block_size=32"),
    *(
        "benchmark=none",
        "verify=none",
        "device=cpu",
        "settings.instrument=none",
        "train.num_workers=0",
        *SMALL,
    ),
)
SCHEMA = """
from typing import Literal
from caramba.config import CallbackConfig, LossConfig, MetricLoggerConfig, OptimizerConfig, ScheduleConfig

class CountStepsConfig(CallbackConfig):
    target = "{impl}:CountSteps"
    type: Literal["CountSteps"] = "CountSteps"
    file: str
    stop_at: int | None = None
    fail_at: int | None = None

class LinesLoggerConfig(MetricLoggerConfig):
    target = "{impl}:LinesLogger"
    type: Literal["LinesLogger"] = "LinesLogger"

class SmoothedLossConfig(LossConfig):
    target = "{impl}:SmoothedLoss"
    type: Literal["SmoothedLoss"] = "SmoothedLoss"
    smoothing: float = 0.1

class SignConfig(OptimizerConfig):
    target = "{impl}:Sign"
    type: Literal["Sign"] = "Sign"

class StepsConfig(ScheduleConfig):
    target = "{impl}:Steps"
    type: Literal["Steps"] = "Steps"
    factor: float = 0.5
"""
IMPL = """
from pathlib import Path
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger

class CountSteps(Callback):
    def __init__(self, config):
        self.config, self.steps = config, 0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += 1
        Path(self.config.file).write_text(f"{self.steps} {trainer.global_step}")
        if self.config.stop_at == trainer.global_step:
            trainer.should_stop = True
        if self.config.fail_at == trainer.global_step and not Path("mended").exists():
            raise RuntimeError("the disk of the callback is gone")

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

class LinesLogger(Logger):
    def __init__(self, config, run_dir, phase):
        super().__init__()
        self.file = run_dir / f"{phase}.lines"
        self.file.write_text("")

    name = version = "lines"

    def log_hyperparams(self, *args, **kwargs):
        pass

    def log_metrics(self, metrics, step=None):
        with open(self.file, "a") as file:
            file.write(f"{step} {metrics.get('loss')}\\n")

class SmoothedLoss:
    def __init__(self, config):
        self.smoothing = config.smoothing

    def __call__(self, logits, targets):
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, label_smoothing=self.smoothing
        )

class Sign(torch.optim.Optimizer):
    def __init__(self, params, config):
        super().__init__(params, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                if value.grad is not None:
                    value.sub_(group["lr"] * value.grad.sign())

class Steps:
    def __init__(self, config):
        self.factor = config.factor

    def __call__(self, step, steps):
        return self.factor if step >= steps // 2 else 1.0
"""
_numbers = itertools.count()


@pytest.fixture(name="plugin")
def _plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Write schema and implementation into the current folder under names that no other test uses."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    names: list[str] = []

    def write(schema: str = SCHEMA, impl: str = IMPL) -> str:
        number = next(_numbers)
        names.extend((f"extension_{number}", f"extension_impl_{number}"))
        Path(f"{names[-1]}.py").write_text(impl)
        Path(f"{names[-2]}.py").write_text(schema.replace("{impl}", names[-1]))
        return names[-2]

    yield write
    activate(())
    for name in names:
        sys.modules.pop(name, None)


def launch(name: str, *words: str) -> Run:
    return caramba.launch([*WORDS, f"plugins=[{name}]", *words], quiet=True)


def test_all_kinds_train_together_and_are_frozen(plugin: Callable[..., str]) -> None:
    name = plugin()
    run = launch(
        name,
        "callbacks=[{type: CountSteps, file: count.txt}]",
        "logger.extra=[{type: LinesLogger}]",
        "logger.lightning={CSVLogger: {}}",
        "train.loss={type: SmoothedLoss, smoothing: 0.2}",
        "train.optimizer={type: Sign}",
        "train.scheduler={type: Steps, factor: 0.25}",
        "train.lr=0.001",
    )
    assert Path("count.txt").read_text() == "12 12"
    frozen = json.loads((run.path / "manifest.json").read_text())
    assert frozen["callbacks"] == [{"type": "CountSteps", "file": "count.txt", "stop_at": None, "fail_at": None}]
    assert frozen["groups"][0]["runs"][0]["train"]["optimizer"] == {"type": "Sign"}
    sources = json.loads((run.path / "sources.json").read_text())
    assert "extension_impl_" in json.dumps(sources)
    rows = run.history("pretrain")
    assert [row["step"] for row in rows] == [10, 12]
    assert [row["lr"] for row in rows] == pytest.approx([0.00025, 0.00025])
    assert rows[0]["loss"] > 0.0
    assert rows[0]["loss"] != rows[0]["ce"]
    lines = (run.path / "pretrain.lines").read_text().split()
    assert lines[::2] == ["10", "12"]
    with open(run.path / "csv/pretrain/metrics.csv") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["10", "12"]
    again = Run(run.path).manifest
    assert again.callbacks[0].type == "CountSteps"


def test_sign_descent_equals_its_formula(plugin: Callable[..., str]) -> None:
    """One step of the plugin's optimiser moves every weight by lr, whatever its gradient."""
    from caramba.data.checkpoint import load_tensors

    name = plugin()
    words = ("train.optimizer={type: Sign}", "train.scheduler=constant", "train.lr=0.01")
    one = launch(name, *words, "train.steps=1", "name=one")
    two = launch(name, *words, "train.steps=2", "name=two")
    before, after = (load_tensors(run.path / "checkpoints/pretrain.safetensors") for run in (one, two))
    moved = [(after[key] - before[key]).abs() for key in before]
    assert all(bool(((part - 0.01).abs() < 1e-6).logical_or(part == 0).all()) for part in moved)
    assert any(bool((part > 0).any()) for part in moved)


def test_callback_that_stops_ends_the_phase_with_its_weights(plugin: Callable[..., str]) -> None:
    run = launch(plugin(), "callbacks=[{type: CountSteps, file: count.txt, stop_at: 5}]")
    assert run.state == "finished"
    assert run.report["phases"][0]["steps"] == 5
    assert (run.path / "checkpoints/pretrain.safetensors").is_file()
    assert not (run.path / "checkpoints/pretrain.state.pt").exists()


def test_callback_that_raises_is_named_and_its_step_resumes_bit_equal(plugin: Callable[..., str]) -> None:
    from caramba.data.checkpoint import load_tensors

    name = plugin()
    words = ("callbacks=[{type: CountSteps, file: count.txt, fail_at: 7}]",)
    with pytest.raises(
        ExtensionFailedError,
        match=r"callbacks\[0\] \(CountSteps\): on_train_batch_end failed at step 7: RuntimeError: the disk of the "
        r"callback is gone \(extension_impl_\d+.py:\d+\); the state of step 7 is saved",
    ):
        launch(name, *words)
    failed = caramba.runs("runs")[0]
    assert failed.state == "failed"
    assert "CountSteps" in (failed.status.error or "")
    Path("mended").touch()
    resumed = launch(name, *words)
    assert resumed.path == failed.path
    assert resumed.state == "finished"
    assert Path("count.txt").read_text() == "12 12"  # the state of the callback resumed too
    whole = launch(name, *words, "name=whole")
    ours, theirs = (load_tensors(run.path / "checkpoints/pretrain.safetensors") for run in (resumed, whole))
    assert all(bool((ours[key] == theirs[key]).all()) for key in theirs)


def test_changed_source_refuses_a_resume(plugin: Callable[..., str]) -> None:
    name = plugin()
    words = ("callbacks=[{type: CountSteps, file: count.txt, fail_at: 7}]",)
    with pytest.raises(ExtensionFailedError):
        launch(name, *words)
    impl = next(Path().glob("extension_impl_*.py"))
    impl.write_text(impl.read_text() + "\n# another source\n")
    with pytest.raises(CarambaError, match="extension_impl"):
        launch(name, *words)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["callbacks=[{type: CountStep, file: a}]"],
            "unknown callback 'CountStep'; did you mean 'CountSteps'",
        ),
        (
            ["callbacks=[{type: LinesLogger}]"],
            "type LinesLogger is a logger, for logger.extra; callbacks takes a callback",
        ),
        (["train.optimizer={type: Steps}"], "type Steps is a schedule, for train.scheduler"),
        (["callbacks=[{type: CountSteps}]"], r"callbacks\[0\].file: required"),
        (["callbacks=[{type: CountSteps, fil: a}]"], "unknown key; did you mean 'file'"),
        (
            ["train.loss={type: SmoothedLoss}", "train.phases.pretrain.phase=blockwise"],
            "replaces the cross-entropy",
        ),
        (["callbacks=[{type: CountSteps, file: a}]", "origin=agent"], "may not name plugins"),
        (
            ["logger.lightning={MLFlowLogger: {}}", "origin=agent", "plugins=[]"],
            "may not set logger.lightning",
        ),
        (["logger.lightning={CSVLoger: {}}"], "did you mean 'CSVLogger'"),
        (
            ["logger.lightning={CSVLogger: {prefx: a}}"],
            "CSVLogger.prefx: unknown argument; did you mean .prefix",
        ),
        (["logger.lightning={CometLogger: {online: false}}"], "so nothing is written"),
    ],
)
def test_wrong_manifest_is_refused_before_training(plugin: Callable[..., str], words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        launch(plugin(), *words)
    assert not list(Path().glob("runs/*/*/checkpoints/*"))


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "class CountSteps(Callback):\n    def __init__(self, config):",
            "class CountSteps(Callback):\n    def __init__(self):",
            r"has __init__\(self\) .*expected class Name\(lightning.pytorch.Callback\): def __init__\(self, config\)",
        ),
        ("class CountSteps(Callback):", "class CountSteps:", "is a class without a base"),
        ("class CountSteps(Callback):", "class CountSteps(torch.nn.Module):", "is no subclass of Callback"),
        (
            "class CountSteps(Callback):",
            "class CountStep(Callback):",
            "has no CountSteps; did you mean 'CountStep'",
        ),
    ],
)
def test_wrong_signature_is_refused_with_the_expected_one(
    plugin: Callable[..., str], old: str, new: str, text: str
) -> None:
    assert old in IMPL
    with pytest.raises(ConfigError, match=text):
        launch(plugin(impl=IMPL.replace(old, new)), "callbacks=[{type: CountSteps, file: a}]")
    assert not list(Path().glob("runs/*/*/checkpoints/*"))


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("logits", "returned torch.float32 .* expected a scalar"),
        ("1 / 0", r"train.loss \(SmoothedLoss\) failed: ZeroDivisionError"),
    ],
)
def test_wrong_loss_is_named(plugin: Callable[..., str], result: str, text: str) -> None:
    start, end = IMPL.index("        return torch.nn.functional"), IMPL.index("class Sign")
    impl = IMPL[:start] + f"        return {result}\n\n" + IMPL[end:]
    with pytest.raises(ExtensionFailedError, match=text):
        launch(plugin(impl=impl), "train.loss={type: SmoothedLoss}")


def test_schema_of_no_kind_is_refused(plugin: Callable[..., str]) -> None:
    schema = """
from typing import Literal
from caramba.config.extension import ExtensionConfig

class OtherConfig(ExtensionConfig):
    target = "{impl}:CountSteps"
    type: Literal["Other"] = "Other"
"""
    with pytest.raises(ConfigError, match="is of no kind; subclass one of CallbackConfig, MetricLoggerConfig"):
        launch(plugin(schema=schema))


def test_extension_is_no_layer(plugin: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match="type CountSteps is no layer; its place is callbacks"):
        launch(plugin(), "model.topology.layers.0={type: CountSteps}")


def test_plan_has_own_optimizer_without_torch(plugin: Callable[..., str]) -> None:
    name = plugin()
    plan: Any = caramba.compile([*WORDS, f"plugins=[{name}]", "train.optimizer={type: Sign}"])
    assert plan.plan.stages[0].estimate is not None


def test_entry_point_of_an_installed_package_names_a_plugin(
    plugin: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = plugin()
    folder = Path("site/short_name-1.0.dist-info")
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: short-name\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[caramba.plugins]\nshort_name = {name}\n")
    monkeypatch.syspath_prepend("site")
    plan = caramba.compile([*WORDS, "plugins=[short_name]", "train.optimizer={type: Sign}"])
    assert [found.module for found in plan.manifest.plugins] == [name]
