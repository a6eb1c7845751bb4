"""The Python API on real small runs, the examples of docs/python.md, and the notebook."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import caramba
from caramba.artifacts import style
from caramba.artifacts.across_runs.run import Run
from caramba.config.manifest import Manifest
from caramba.config.model import ModelConfig
from caramba.console import logger
from caramba.distill import LanguageModelObjective
from caramba.errors import ConfigError
from caramba.launch.call import RunFailedError
from tests.integration.commands import SMALL, SMALL_TEACHER, leave_blank

ROOT = Path(__file__).parents[2]
WORDS = ("model=tiny", "train=pretrain", "train.steps=20", "device=cpu", *SMALL)


@pytest.fixture(autouse=True, scope="module")
def blank() -> Iterator[None]:
    """Figures of these runs are not looked at, and drawing them takes longer than the runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "_saved", leave_blank)
        yield


@pytest.fixture(name="here", scope="module")
def _here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("api")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(name="run", scope="module")
def _run(here: Path) -> Run:
    assert not logger.quiet
    run = caramba.launch([*WORDS, "benchmark=smoke"], quiet=True)
    assert not logger.quiet
    return run


@pytest.fixture(name="model", scope="module")
def _model(run: Run) -> Any:
    return caramba.load(run, device="cpu")


def plain_process(code: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_neither_torch_nor_hydra_nor_pydantic(tmp_path: Path) -> None:
    code = (
        "import sys, caramba; assert 'launch' in dir(caramba) and 'load' in dir(caramba); "
        "print([name for name in ('torch', 'hydra', 'pydantic', 'lightning') if name in sys.modules])"
    )
    assert plain_process(code, tmp_path).strip() == "[]"


def test_compile_does_not_load_torch(tmp_path: Path) -> None:
    code = (
        "import sys, caramba; plan = caramba.compile(['model=tiny', 'train=pretrain']); "
        "print(plan.parameters, 'torch' in sys.modules)"
    )
    assert plain_process(code, tmp_path).split() == ["1049728", "False"]


def test_packages_stay_packages_and_commands() -> None:
    import caramba.distill
    import caramba.launch
    import caramba.runs

    assert callable(caramba.launch)
    assert caramba.launch.main(["--version"]) == 0
    assert caramba.runs.MANIFEST == "manifest.json"
    assert issubclass(LanguageModelObjective, caramba.distill.Objective)


def test_unknown_name_lists_the_functions() -> None:
    with pytest.raises(AttributeError, match=r"has no attribute .lunch.; it has .*launch"):
        _ = caramba.lunch  # pyright: ignore[reportAttributeAccessIssue]


def test_run_has_state_metrics_and_history(run: Run) -> None:
    assert run.state == "finished"
    assert run.metrics["perplexity.student.nll"] == run.measured["perplexity.student.nll"].value > 0
    assert [row["step"] for row in run.history("pretrain")] == [10, 20]
    assert run.history()[-1]["loss"] > 0
    assert isinstance(run.manifest, Manifest)
    assert run.overrides == (*WORDS, "benchmark=smoke")
    assert run.report["run_id"] == run.path.name
    assert repr(run) == f"Run({run.name}, finished)"


def test_run_of_unknown_phase_or_group_names_the_nearest(run: Run) -> None:
    with pytest.raises(ConfigError, match="no metrics of phase 'pretrian'; did you mean 'pretrain'"):
        run.history("pretrian")
    with pytest.raises(ConfigError, match="has no group 'main2'"):
        run.history(group="main2")


def test_runs_is_a_table(run: Run) -> None:
    table = caramba.runs("runs", metrics=["perplexity.student.nll"])
    assert run in list(table)
    row = next(row for row in table.rows() if row["run"] == run.path.name)
    assert row["state"] == "finished"
    assert row["perplexity.student.nll"] == run.metrics["perplexity.student.nll"]
    assert str(table).splitlines()[0].split()[-1] == "perplexity.student.nll"
    assert f"<td>{run.path.name}</td>" in table._repr_html_()
    with pytest.raises(ConfigError, match="perplexity"):
        caramba.runs("runs", metrics=["perplexity.student.nl"])


def test_table_in_pandas_has_its_columns(run: Run) -> None:
    pytest.importorskip("pandas")
    frame = caramba.runs("runs").to_pandas()
    assert list(frame.columns) == list(caramba.runs("runs").columns)
    assert frame["state"].iloc[0] == "finished"


def test_mistakes_raise_and_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words, text in (
        (["model=tiny", "train=pretrain", "train.stepz=3"], "did you mean 'steps'"),
        ("model=tiny", "overrides are a list"),
        (["--multirun", "model=tiny"], "is an option of the command line"),
    ):
        with pytest.raises(ConfigError, match=text):
            caramba.launch(words)
    with pytest.raises(ConfigError, match="no such folder"):
        caramba.launch(["model=tiny"], config_dirs=["nowhere"])
    assert not any(tmp_path.iterdir())


def test_failed_benchmark_raises_with_its_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise MemoryError("no room for the logits")

    monkeypatch.setattr(importlib.import_module("caramba.evaluation.perplexity"), "perplexity", fails)
    with pytest.raises(RunFailedError, match="benchmark perplexity") as failure:
        caramba.launch([*WORDS, "train.steps=2", "name=fails", "benchmark=smoke"], quiet=True)
    assert failure.value.run.state == "failed"
    assert (failure.value.run.path / "checkpoints/pretrain.safetensors").is_file()


def test_load_generates_as_the_command(model: Any, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    from caramba.cli import main

    options = {"max_new_tokens": 8, "temperature": 0.0}
    text = model.generate("def f(", **options)
    assert model.generate(["def f(", "import"], **options)[0] == text
    words = ["--prompt", "def f(", "--max-new-tokens", "8", "--temperature", "0", "--device", "cpu", "--json"]
    capsys.readouterr()
    assert main(["generate", str(run.path), *words]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["text"] == text
    assert model.generate_rows(["def f("], **options)[0].tokens
    with pytest.raises(ConfigError, match="temperature"):
        model.generate("a", temprature=1.0)


def test_load_evaluates_held_out_text_a_file_and_tasks(model: Any, run: Run, tmp_path: Path) -> None:
    found = model.evaluate(windows=4, block_size=64)
    assert set(found) == {"nll", "perplexity", "bits_per_byte", "unique_tokens"}
    assert found["nll"] == pytest.approx(run.metrics["perplexity.student.nll"], rel=0.2)
    file = tmp_path / "text.txt"
    file.write_text("import os\n" * 200)
    assert model.evaluate(file, windows=2, block_size=32)["unique_tokens"] == 64
    (tmp_path / "fit.jsonl").write_text('{"context": "import", "choices": [" os", "???"], "gold": 0}\n')
    assert 0 <= model.evaluate(tasks=["fit"], data=tmp_path)["fit.acc"] <= 1
    for options, text in (
        ({"tasks": "fit"}, "a list of names"),
        ({"limit": 3}, "are for tasks"),
        ({"tasks": ["fit"], "text": file}, "text and tasks"),
    ):
        with pytest.raises(ConfigError, match=text):
            model.evaluate(**options)


def test_load_refuses_wrong_options(run: Run) -> None:
    with pytest.raises(ConfigError, match="device='gpu'; expected one of auto, cpu, cuda, mps"):
        caramba.load(run, device="gpu")
    with pytest.raises(ConfigError, match="no run there"):
        caramba.load("runs/nowhere")


def student_config() -> ModelConfig:
    return caramba.compile(["model=tiny_dba", "train=upcycle", "device=cpu", *SMALL, *SMALL_TEACHER]).manifest.model


def test_transplant_and_distill_lower_the_loss(run: Run) -> None:
    teacher = caramba.load(run, device="cpu").model
    config = student_config()
    tokens = torch.randint(0, 512, (24, 48), generator=torch.Generator().manual_seed(0))
    student, report = caramba.transplant(teacher, config, tokens)
    assert report.method == "dba"
    assert report.calibration_tokens > 0
    batches = [tokens[:8]] * 12
    seen: list[int] = []
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    found = caramba.distill(
        student,
        teacher,
        batches,
        objective="blockwise",
        lr=1e-3,
        on_step=lambda step, losses: seen.append(step),
    )
    assert seen == list(range(1, 13))
    assert found[-1]["loss"] < found[0]["loss"] * 0.95
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())
    with torch.no_grad():
        for parameter in teacher.parameters():  # whose logits differ from its random student's
            parameter.mul_(3)
    student, report = caramba.transplant(teacher, config, surgery={"method": "random"})
    assert report.calibration_tokens == 0
    found = caramba.distill(student, teacher, batches, objective="kl", steps=6, lr=3e-4)
    assert len(found) == 6
    assert found[-1]["kl"] < found[0]["kl"]


def test_transplant_and_distill_refuse_what_does_not_fit(run: Run) -> None:
    teacher = caramba.load(run, device="cpu").model
    with pytest.raises(ConfigError, match=r"method=dba measures the teacher on tokens \[N, T\] int64; got none"):
        caramba.transplant(teacher, student_config())
    with pytest.raises(ConfigError, match="objective='blokwise'; expected blockwise, drift, kl"):
        caramba.distill(teacher, teacher, [], objective="blokwise")
    with pytest.raises(ConfigError, match="trains another model"):
        caramba.distill(teacher, teacher, [], objective=LanguageModelObjective(caramba.load(run, device="cpu").model))


@pytest.mark.slow
def test_examples_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"docs/python.md block {number}", "exec"), names)
    assert names["losses"][-1]["loss"] < names["losses"][0]["loss"]


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs/first_experiment.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    names: dict[str, Any] = {}
    first = min(number for number, cell in enumerate(notebook["cells"]) if cell["cell_type"] == "code")
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"first_experiment.ipynb cell {number}", "exec"), names)
            if number == first:  # the same steps, of fewer tokens
                names["words"] += ["train.batch_size=2", "train.block_size=64"]
    assert names["best"] in names["runs"]


def test_executed_notebook_has_the_cells_of_the_notebook_and_their_outputs() -> None:
    plain, executed = (
        json.loads((ROOT / "docs" / name).read_text())["cells"]
        for name in ("first_experiment.ipynb", "first_experiment_executed.ipynb")
    )
    assert ["".join(cell["source"]) for cell in executed] == ["".join(cell["source"]) for cell in plain]
    outputs = [output for cell in executed for output in cell.get("outputs", [])]
    assert len(outputs) >= 6
    assert not [output for output in outputs if output["output_type"] == "error"]
