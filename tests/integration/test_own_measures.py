"""Data sources, benchmarks and checks of plugins: used, frozen, cached by their code, and refused by name."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import caramba
from caramba.artifacts.across_runs.run import Run
from caramba.config.plugins import activate
from caramba.errors import CarambaError, ConfigError

pytestmark = pytest.mark.usefixtures("blank_figures")
WORDS = (
    *("model=tiny", "train=pretrain", "train.steps=4", "train.batch_size=2", "train.block_size=32"),
    *("device=cpu", "settings.instrument=none", "train.num_workers=0", "verify=none"),
    *("model.embedder.vocab_size=257", "data.tokenizer=byte", "data.vocab_size=null"),
)
SOURCE = ("data.type=source", "data.source={type: Counting, n: 60}")
SCHEMA = """
from typing import Literal
from caramba.config import DataSourceConfig, OwnBenchmarkConfig, OwnCheckConfig

class CountingConfig(DataSourceConfig):
    target = "{impl}:Counting"
    type: Literal["Counting"] = "Counting"
    n: int

class TopShareConfig(OwnBenchmarkConfig):
    target = "{impl}:TopShare"
    type: Literal["TopShare"] = "TopShare"
    block_size: int = 32

class SameTopConfig(OwnCheckConfig):
    target = "{impl}:SameTop"
    type: Literal["SameTop"] = "SameTop"
"""
IMPL = """
import torch

class Counting:
    def __init__(self, config):
        self.n = config.n

    def texts(self, split):
        for number in range(self.n if split == "train" else self.n // 2):
            yield f"{split} document {number}: " + " ".join(map(str, range(number, number + 20)))

class TopShare:
    def __init__(self, config):
        self.block_size = config.block_size

    def __call__(self, model, windows, tokenizer):
        inputs, targets = windows(self.block_size)[0]
        share = (model(inputs[None]).argmax(-1)[0] == targets).float().mean()
        return {"share": share, "entries": tokenizer.vocab_size}

class SameTop:
    def __init__(self, config):
        pass

    def __call__(self, teacher, student, windows):
        inputs, _ = windows(32)[0]
        same = teacher(inputs[None]).argmax(-1) == student(inputs[None]).argmax(-1)
        return {"share": same.float().mean()}
"""
_numbers = itertools.count()


@pytest.fixture(name="plugin")
def _plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path / ".caramba"))
    monkeypatch.setattr(sys, "path", sys.path[:])
    names: list[str] = []

    def write(impl: str = IMPL) -> str:
        number = next(_numbers)
        names.extend((f"measures_{number}", f"measures_impl_{number}"))
        Path(f"{names[-1]}.py").write_text(impl)
        Path(f"{names[-2]}.py").write_text(SCHEMA.replace("{impl}", names[-1]))
        return names[-2]

    yield write
    activate(())
    for name in names:
        sys.modules.pop(name, None)


def launch(name: str, *words: str) -> Run:
    return caramba.launch([*WORDS, f"plugins=[{name}]", *words], quiet=True)


BENCHMARK = "benchmark.benchmarks=[{id: own, config: {type: TopShare}, models: [student]}]"


def test_a_source_trains_and_a_benchmark_measures(plugin: Callable[..., str]) -> None:
    run = launch(plugin(), *SOURCE, BENCHMARK)
    assert run.state == "finished"
    assert 0.0 <= run.metrics["TopShare.student.share"] <= 1.0
    assert run.metrics["TopShare.student.entries"] == 257
    frozen = Run(run.path).manifest.groups[0]
    assert frozen.data.source is not None
    assert frozen.data.source.model_dump() == {"type": "Counting", "n": 60}
    assert frozen.benchmarks[0].config.model_dump() == {"type": "TopShare", "block_size": 32}
    assert "train document 0: 0 1 2" in caramba.load(run, device="cpu").tokenizer.decode(_first_tokens())


def _first_tokens() -> list[int]:
    from caramba.data.folder import open_token_folder

    folders = list(Path(".caramba/data").glob("source-*"))
    assert len(folders) == 1
    return open_token_folder(folders[0]).train[:200].tolist()


def test_a_changed_source_is_read_again(plugin: Callable[..., str]) -> None:
    launch(plugin(), *SOURCE, "benchmark=none")
    launch(plugin(IMPL.replace("document", "page")), *SOURCE, "benchmark=none")
    assert len(list(Path(".caramba/data").glob("source-*"))) == 2


def test_a_check_of_a_plugin_holds_its_bounds(plugin: Callable[..., str]) -> None:
    words = [
        *("model=tiny_dba", "train=upcycle", "model.teacher.manifest.embedder.vocab_size=257"),
        *("benchmark=none", "train.num_workers=0"),
    ]
    check = "verify.checks=[{type: SameTop, min: {share: 1.5}, fail_fast: %s}]"
    name = plugin()
    run = launch(name, *SOURCE, *words, check % "false")
    assert run.state == "finished"
    assert 0.0 <= run.metrics["verify.SameTop.share"] <= 1.0
    with pytest.raises(CarambaError, match=r"SameTop.*share=.* is below 1\.5"):
        launch(name, *SOURCE, *words, check % "true", "name=strict")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["data.type=source"], "data.source is set exactly when data.type is source"),
        (["data.type=source", "data.source={type: Countin, n: 3}"], "did you mean 'Counting'"),
        (["data.type=source", "data.source={type: TopShare}"], "type TopShare is a benchmark"),
        (
            ["benchmark.benchmarks=[{id: a, config: {type: Counting, n: 2}}]"],
            "type Counting is a data source, for data.source",
        ),
        ([*SOURCE, "origin=agent"], "may not name plugins"),
    ],
)
def test_wrong_kinds_are_refused(plugin: Callable[..., str], words: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        launch(plugin(), *words)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("def texts(self, split)", "def texts(self)", r"has texts\(self\).*def texts\(self, split\)"),
        (
            "def __call__(self, model, windows, tokenizer)",
            "def __call__(self, model)",
            r"expected class Name: .*def __call__\(self, model, windows, tokenizer\)",
        ),
    ],
)
def test_wrong_signatures_are_refused(plugin: Callable[..., str], old: str, new: str, text: str) -> None:
    assert old in IMPL
    with pytest.raises(ConfigError, match=text):
        launch(plugin(IMPL.replace(old, new)), *SOURCE, BENCHMARK)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            'yield f"',
            "yield 1 / 0; (f'\"')\n            yield f\"",
            "texts.'train'. failed: ZeroDivisionError",
        ),
        ('if split == "train" else self.n // 2', 'if split == "train" else 0', "texts.'val'. yields nothing"),
    ],
)
def test_a_source_that_fails_is_named(plugin: Callable[..., str], old: str, new: str, text: str) -> None:
    assert old in IMPL
    with pytest.raises(CarambaError, match=text):
        launch(plugin(IMPL.replace(old, new)), *SOURCE, "benchmark=none")


def test_a_benchmark_that_fails_keeps_the_run(plugin: Callable[..., str]) -> None:
    from caramba.launch.call import RunFailedError

    with pytest.raises(RunFailedError):
        launch(
            plugin(IMPL.replace('return {"share": share, "entries": tokenizer.vocab_size}', "return 3")),
            *SOURCE,
            BENCHMARK,
        )
    run = caramba.runs("runs")[0]
    assert "expected numbers by name" in str(run.report)
