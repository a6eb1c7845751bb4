"""The command line as a user meets it: a process of its own, its exit status, its words, and what it does not import."""

from __future__ import annotations

import io
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from caramba.cli import main
from caramba.launch.freeze import freeze
from caramba.runs import mint
from caramba.runs.shell import show_path

HEAVY = ("torch", "lightning", "numpy", "transformers", "litellm")
HELP_SECONDS = 1.0
COMPILE_SECONDS = 4.0
BARE_SECONDS = 0.05  # of an interpreter that does nothing, on a machine that those are for


def cpu_seconds():
    """Return what the processes that were started and have ended took of the CPU: others may hold it meanwhile."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def allowed(seconds):
    """Return how many seconds of the CPU that is here, in proportion where it is slow."""
    before = cpu_seconds()
    subprocess.run([sys.executable, "-c", ""], check=True)
    return seconds * max(1.0, (cpu_seconds() - before) / BARE_SECONDS)


@pytest.fixture(name="caramba")
def _caramba(tmp_path):
    def run(*words, module="caramba", status=0, **environment):
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            cwd=tmp_path,
            env={**clean, "HF_HOME": str(tmp_path / "nowhere"), **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return run


@pytest.fixture(name="called")
def _called(tmp_path, monkeypatch, capsys):
    """The same command line in this process, where starting an interpreter would add nothing to what is tested."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)

    def run(*words, status=0):
        capsys.readouterr()
        assert main(list(words)) == status
        return capsys.readouterr()

    return run


def modules_after(code, tmp_path):
    """Run `code` in a process and return what it printed last: the names of the modules it loaded."""
    probe = f"import sys, json\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("module", ["caramba", "caramba.launch"])
def test_help_is_instant_and_lists_groups_and_commands(caramba, module):
    started = cpu_seconds()
    text = caramba("--help", module=module).stdout
    assert cpu_seconds() - started < allowed(HELP_SECONDS)
    for word in ("tiny_dba", "upcycle", "stdlib_bytes", "doctor", "--multirun", "Pretrain the teacher"):
        assert word in text


def test_what_an_output_has_no_sign_for_ends_nothing(monkeypatch):
    """A model writes what a terminal of another alphabet cannot show."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["--version"]) == 0
    print("caf\N{LATIN SMALL LETTER E WITH ACUTE}", flush=True)
    assert shown.buffer.getvalue().endswith(b"caf\\xe9\n")


def test_help_loads_nothing_heavy(tmp_path):
    loaded = modules_after("from caramba.cli import main\nassert main(['--help']) == 0", tmp_path)
    assert not loaded & {*HEAVY, "hydra", "omegaconf", "pydantic", "yaml", "rich"}


def test_compile_loads_no_torch(tmp_path):
    loaded = modules_after("from caramba.cli import main\nassert main(['compile']) == 0", tmp_path)
    assert not loaded & {"torch", "lightning", "transformers", "litellm"}
    assert "hydra" in loaded


def test_compile_prints_the_plan_in_time_and_writes_nothing(caramba, tmp_path):
    started = cpu_seconds()
    text = caramba("compile", "model=llama32_dba", "train=blockwise", "--print-plan").stdout
    assert cpu_seconds() - started < allowed(COMPILE_SECONDS)
    assert "python -m caramba.launch model=llama32_dba train=blockwise" in text
    assert "is not built yet" not in text
    assert list(tmp_path.iterdir()) == []
    plan = json.loads(caramba("compile", "--json").stdout)
    assert plan["name"] == "tiny_dba_upcycle"
    assert [stage["id"] if "id" in stage else stage.get("name") for stage in plan["stages"]]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trian.steps=3"], "error: trian: unknown key; did you mean 'train'? (command line: trian.steps=3)"),
        (
            ["model.topology.layers.0.type=AttentionLyer"],
            "model.topology.layers[0].type: 'AttentionLyer' unknown type",
        ),
        (["+train.step=3"], "error: train.step: unknown key; did you mean 'steps'?"),
        (["train=blokwise"], "error: train: no option 'blokwise'; did you mean 'blockwise'?"),
        (["model._target_=os.system"], "_target_ would run code"),
        (["name=${oc.env:HOME}"], "calls a resolver"),
        (["train.steps=many"], "error: train.steps: got 'many', expected a valid integer"),
        (["model=llama32_dba", "train=blockwise"], "hf auth login"),
        (["train.orchestrator_strategies=[lyon]", "train.orchestrator_enabled=true"], "did you mean 'lion'?"),
        (["data.vocab_size=512"], "does not fit the data of group 'quick'"),
        (["--cofig-dir", "x"], "did you mean '--config-dir'?"),
        (["--config-dir", "nowhere"], "no such folder"),
        (["--multirun", "seed=1,2", "train.steps=x"], "point 'seed=1 train.steps=x' of the sweep"),
        (["manifest=nowhere.yaml"], "manifest=nowhere.yaml: no such file"),
        (["resume=runs/nowhere"], "no run there"),
    ],
)
def test_mistakes_exit_2_and_write_nothing(called, tmp_path, words, text):
    done = called(*words, status=2)
    assert text in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", ["caramba", "caramba.launch"])
def test_a_mistake_in_a_process_of_its_own(caramba, tmp_path, module):
    started = cpu_seconds()
    done = caramba("trian.steps=3", module=module, status=2)
    assert cpu_seconds() - started < allowed(COMPILE_SECONDS)
    assert done.stderr == "error: trian: unknown key; did you mean 'train'? (command line: trian.steps=3)\n"
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(called):
    done = called("trian.steps=3", "--debug", status=2)
    assert "Traceback" in done.err
    assert "error: trian" in done.err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launhc"], "unknown command 'launhc'; did you mean 'launch'?"),
        (["trian"], "unknown command 'trian'; did you mean 'launch'?"),
        (["ls"], "unknown command 'ls'; did you mean 'status'?"),
        (["compile", "wandb=true"], "did you mean 'logger.wandb'?"),
        (["compile", "n_layers=3"], "did you mean 'model.topology.layers.0.repeat'?"),
        (["compile", "devices=2"], "here it is parallel=ddp parallel.dp=N"),
        (["compile", "callbacks=[{type: EarlyStopping}]"], "here it is trainer.early_stopping.patience=N"),
        (["resume"], "resume: expected one run"),
        (["resume", "latest"], "there are no runs under"),
        (["run"], "run: expected one manifest file"),
        (["run", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["compile", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["schema", "--jsn"], "schema: unexpected --jsn"),
        (["run", "--group"], "--group needs a value"),
    ],
)
def test_commands_name_their_mistakes(called, tmp_path, words, text):
    assert text in called(*words, status=2).err
    assert list(tmp_path.iterdir()) == []


FILE = """\
name: mine
defaults: {save_every: 5}
vars: {width: 8}
model:
  embedder: {vocab_size: 300, d_model: "${width}"}
  topology:
    type: StackedTopology
    layers:
      - {type: RMSNormLayer, d_model: "${vars.width}"}
groups:
  - name: quick
    data: {type: stdlib, vocab_size: 300}
    runs: [{id: pre, steps: 3, train: {phase: pretrain, lr: 1e-3}}]
  - name: paper
    data: tokens.npy
"""


def test_a_single_file_manifest_compiles_with_a_group_and_overrides(called, tmp_path):
    (tmp_path / "m.yaml").write_text(FILE)
    plan = json.loads(called("compile", "m.yaml", "--group", "quick", "groups.0.runs.0.train.lr=0.01", "--json").out)
    assert plan["name"] == "mine"
    done = called("compile", "m.yaml", "groups.0.runs.0.train.lrr=1", status=2)
    assert "groups[0].runs[0].train.lrr: unknown key; did you mean 'lr'? (command line: groups.0" in done.err
    (tmp_path / "m.yaml").write_text(FILE.replace("RMSNormLayer", "RMSNormLyer"))
    done = called("run", "m.yaml", "--group", "quick", status=2)
    assert "model.topology.layers[0].type: 'RMSNormLyer' unknown type; did you mean 'RMSNormLayer'?" in done.err
    assert "(m.yaml:9)" in done.err
    (tmp_path / "m.yaml").write_text(FILE)
    assert "groups: quick, paper" in called("run", "m.yaml", "--group", "qick", status=2).err


def test_cfg_job_and_info_and_completion_pass_through(caramba, tmp_path):
    text = caramba("--cfg", "job", "train=pretrain", module="caramba.launch").stdout
    assert "phases:\n    pretrain:" in text
    assert "hydra" not in text
    assert "model/tiny_dba" in caramba("--info", "defaults", module="caramba.launch").stdout
    assert "complete -o nospace" in caramba("--shell-completion", "install=bash").stdout
    for line in ("caramba launch model=t", "caramba model=t"):
        done = caramba("-sc", "query=bash", COMP_LINE=line)
        assert done.stdout.split() == [
            "model=tiny",
            "model=tiny_dba",
            "model=tiny_dba_per_head",
            "model=tiny_memory",
        ]
    assert list(tmp_path.iterdir()) == []


def test_hydra_help_advises_nothing_that_is_refused(caramba):
    shown = caramba("--hydra-help", module="caramba.launch").stdout
    assert "--cfg,-c : Show config instead of running [job]" in shown
    assert "--experimental-rerun : not taken: caramba rerun RUN" in shown
    assert "--config-path,-cp : not taken: --config-dir DIR adds a folder of groups\n--config-name" in shown
    assert not any(word in shown for word in ("--cfg hydra", "|all]", "hydra/launcher", "hydra/job_logging"))


def test_cfg_job_of_a_sweep_is_a_document_for_each_point(called):
    words = ("launch", "-m", "--cfg", "job", "model=tiny", "train=pretrain", "seed=1,2")
    made = list(yaml.safe_load_all(called(*words).out))
    assert [tree["seed"] for tree in made] == [1, 2]
    refused = called(*words[:-1], "hydra/sweeper=optuna", "train.lr=interval(1e-4,1e-2)", status=2).err
    assert "hydra/sweeper=optuna draws its points from what earlier ones measured; leave it and -m out" in refused


def test_schema_for_people_and_machines(called):
    assert "\nPhase\n" in called("schema").out
    assert json.loads(called("schema", "--json").out)["$defs"]["Node"]["oneOf"]


def test_a_resume_from_another_manifest_lists_the_differing_keys(called, tmp_path):
    run = str(mint(freeze(["train.steps=4"]).manifest, ["train.steps=4"], tmp_path / "runs"))
    text = called("train.steps=5", f"resume={run}", status=2).err
    assert "groups[0].runs[0].train.steps: 4 -> 5" in text
    assert f"caramba resume {show_path(Path(run))}" in text
    assert len(list((tmp_path / "runs" / "tiny_dba_upcycle").iterdir())) == 1


def test_a_sweep_runs_every_point_and_reports_the_failed_ones(called, tmp_path):
    words = ("model=tiny", "train=pretrain", "benchmark=none", "device=cpu", "settings.gpu=H100,H200")
    done = called("--multirun", *words, status=1)
    assert "[1/2] settings.gpu=H100" in done.err
    assert "2 of 2 points failed;" in done.err
    assert done.err.count("(exit status 2)") == 2
    assert "settings.gpu=H200: the run is for that GPU" in done.err
    (left,) = tmp_path.glob("runs/*/*")
    assert left.name == "sweeps", "a run refused on its device leaves nothing but its line in the index"


def test_a_sweep_with_missing_data_at_one_point_starts_nothing(called, tmp_path):
    (tmp_path / "a.tokens").write_text("1 2 3 " * 2000)
    words = ("model=tiny", "train=pretrain", "benchmark=none", "data=tokens", "data.path=a.tokens,b.npy")
    done = called("--multirun", *words, status=2)
    assert "b.npy: there is no such token file or folder" in done.err
    assert "nothing was started" in done.err
    assert not (tmp_path / "runs").exists()


def test_the_worker_refuses_what_is_no_run(caramba, tmp_path):
    assert "cannot read the manifest" in caramba("nowhere/manifest.json", module="caramba.worker", status=2).stderr
    assert "expected one manifest" in caramba(module="caramba.worker", status=2).stderr
    assert list(tmp_path.iterdir()) == []


def test_help_of_a_command_is_wrapped_and_names_every_option(called):
    from caramba.infer.arguments import KEYS, SPECULATION

    text = called("generate", "--help").out
    assert max(len(line) for line in text.splitlines()) <= 102
    for key in (*KEYS, *SPECULATION):
        assert f"  --{key.replace('_', '-')} " in text


def test_a_misspelt_option_of_generate_gets_its_nearest_name(called):
    error = called("generate", "latest", "--promt=x", status=2).err
    assert "unrecognized arguments: --promt=x; did you mean '--prompt'? caramba generate RUN|DIR" in error
    assert "(all options: caramba generate --help)" in error
    assert len(error) < 250


def test_what_a_manifest_file_lacks_is_said_with_the_file(called, tmp_path):
    (tmp_path / "lacking.yaml").write_text("name: lacking\n")
    assert "model: required, and not given (lacking.yaml)" in called("run", "lacking.yaml", status=2).err


@pytest.mark.parametrize(
    "words",
    [["status", "n" * 300], ["rm", "n" * 300], ["collect", f"x/{'n' * 300}"], ["resume", "n" * 300]],
    ids=lambda words: words[0],
)
def test_a_path_that_no_file_system_has_is_a_mistake_of_the_user(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert len(shown) < 500
