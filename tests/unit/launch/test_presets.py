"""Every experiment with every option of every group: the typed option is what is printed, and what runs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from tests.unit.launch.test_compose import manifest_of

from caramba.cli import main
from caramba.config.verify import FidelityVerifyConfig
from caramba.errors import ConfigError
from caramba.launch.compose import compose
from caramba.launch.config_files import conf_root, groups
from caramba.launch.freeze import freeze

GROUPS = {group: sorted(options) for group, options in groups().items() if group != "experiment"}
EXPERIMENTS = sorted(groups()["experiment"])
TINY = ("model=tiny_dba", "train=upcycle", "data=stdlib")


def options_in_turn(experiment: str, experiments: list[str], chosen: Collection[str]) -> Iterator[dict[str, str]]:
    """Yield an option of every chosen group, some times: other ones for every experiment, and each for one of them."""
    longest = max(len(GROUPS[group]) for group in chosen)
    for turn in range(experiments.index(experiment), longest, len(experiments)):
        yield {group: GROUPS[group][turn % len(GROUPS[group])] for group in chosen}


def body(group: str, option: str) -> dict[str, Any]:
    """Return what an option file sets, without its defaults list."""
    tree = yaml.safe_load((conf_root() / group / f"{option}.yaml").read_text()) or {}
    return {key: value for key, value in tree.items() if key != "defaults"}


def required(group: str, option: str) -> list[str]:
    """Return overrides of the keys that an option leaves to the user."""
    flat = OmegaConf.create({group: body(group, option)})
    return [f"{key}=x" for key in sorted(OmegaConf.missing_keys(flat))]


def missing(expected: Any, found: Any, own: Any, path: str = "") -> list[str]:
    """Return the paths at which `found` lacks what `expected` sets; `own` holds the single values of an experiment."""
    if isinstance(expected, dict) and expected:
        return [
            line
            for key, value in expected.items()
            for line in missing(
                value,
                found.get(key) if isinstance(found, dict) else None,
                own.get(key) if isinstance(own, dict) else None,
                f"{path}.{key}",
            )
        ]
    return [] if expected in ({}, None, "???") or found in (expected, own) else [path]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_compose_every_typed_option_wins_over_the_experiment(experiment):
    """Trap: experiment=smoke wrote its checks inline, and verify=eval lost its own without a word."""
    preset = body("experiment", experiment)
    for typed in options_in_turn(experiment, EXPERIMENTS, GROUPS):
        words = [f"experiment={experiment}", *(f"{group}={option}" for group, option in typed.items())]
        composed = compose([*words, *(key for g, option in typed.items() for key in required(g, option))])
        assert {group: composed.choices[group] for group in typed} == typed
        for group, option in typed.items():
            is_global = "@package _global_" in (conf_root() / group / f"{option}.yaml").read_text()
            place = composed.raw if is_global else composed.raw[group]
            own = preset if is_global else preset.get(group)
            assert missing(body(group, option), place, own) == [], (experiment, group, option)


OWN = sorted({*EXPERIMENTS} - {"bottleneck", "decoupled", "gqa"})  # which are as baseline


@pytest.mark.parametrize("experiment", OWN)
def test_freeze_typed_checks_and_benchmarks_are_printed_and_run(experiment, capsys):
    for typed in options_in_turn(experiment, OWN, ("verify", "benchmark")):
        checks, suite = typed["verify"], typed["benchmark"]
        words = [f"experiment={experiment}", *TINY, f"verify={checks}", f"benchmark={suite}"]
        assert main(["launch", *words, "--cfg", "job"]) == 0
        printed = yaml.safe_load(capsys.readouterr().out)
        assert (printed["verify"], printed["benchmark"]) == (
            body("verify", checks),
            body("benchmark", suite),
        )
        (group,) = freeze(words).manifest.groups
        run = json.loads(group.model_dump_json())
        ran = [check for item in run["runs"] for check in item["verify"]]
        assert [as_written(*pair) for pair in zip(ran, printed["verify"]["checks"], strict=True)] == printed["verify"][
            "checks"
        ]
        benches = printed["benchmark"]["benchmarks"]
        assert [as_written(*pair) for pair in zip(run["benchmarks"], benches, strict=True)] == benches


def as_written(full: Any, written: Any) -> Any:
    """Return of a validated value the keys that were written."""
    if isinstance(written, dict):
        return {key: as_written(full[key], value) for key, value in written.items()}
    if isinstance(written, list):
        return [as_written(*pair) for pair in zip(full, written, strict=True)]
    return full


@pytest.mark.parametrize("experiment", [name for name in EXPERIMENTS if not name.startswith("smollm2_")])
def test_freeze_experiment_alone_runs_what_is_printed(experiment, capsys):
    assert main(["launch", f"experiment={experiment}", "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    (group,) = freeze([f"experiment={experiment}"]).manifest.groups
    ran = [check.type for item in group.runs for check in item.verify]
    assert ran == [check["type"] for check in printed["verify"]["checks"]]
    assert [item.id for item in group.benchmarks] == [item["id"] for item in printed["benchmark"]["benchmarks"]]


@pytest.mark.parametrize(
    ("words", "runs_checks"),
    [
        (["model=tiny_dba"], True),
        (["model=tiny", "train=pretrain"], False),
        (["model=tiny_dba", "train=pretrain"], False),
        (["train=none"], False),
        (["train=none", "verify=default", "model.teacher.checkpoint=runs/x"], True),
        (["train=pretrain", "model.teacher.checkpoint=runs/x"], True),
    ],
)
@pytest.mark.parametrize("flags", [[], ["--resolve"]])
def test_cfg_job_prints_the_checks_that_run(words, runs_checks, flags, capsys):
    """Trap: checks that lowering leaves out, for want of a teacher or a phase, were printed."""
    assert main(["launch", *words, "--cfg", "job", *flags]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)["verify"]["checks"]
    assert bool(printed) == runs_checks
    ran = [check for run in manifest_of(*words).groups[0].runs for check in run.verify]
    assert len(ran) == len(printed)


@pytest.mark.parametrize("group", sorted([*GROUPS, "experiment"]))
@pytest.mark.parametrize("sign", ["", "+"])
def test_read_words_null_for_a_group_names_the_option(group, sign, capsys):
    """Trap: benchmark=null showed Hydra's own error."""
    assert main(["compile", f"{sign}{group}=null"]) == 2
    error = capsys.readouterr().err
    assert f"command line: {sign}{group}=null: null is not an option of {group};" in error
    has_none = "none" in groups()[group]
    assert (f"write {group}=none" if has_none else f"options: {', '.join(GROUPS.get(group, ()))}") in error


def experiment_folder(folder: Path, text: str) -> Path:
    (folder / "site" / "experiment").mkdir(parents=True)
    (folder / "site" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}")
    return folder / "site"


INLINE = "verify:\n  checks:\n    - {type: fidelity, batches: 1, batch_size: 2, block_size: 64}\n"


@pytest.mark.parametrize("option", ["eval", "none"])
def test_compose_list_of_a_users_experiment_over_a_typed_option_is_refused(tmp_path, option):
    """An experiment of a user may still write its checks inline; a typed option must not lose to it in silence."""
    site = experiment_folder(tmp_path, INLINE)
    with pytest.raises(
        ConfigError,
        match=rf"^command line: verify={option}: .*mine.yaml:3 replaces verify.checks of conf/verify/{option}.yaml; "
        r"move that list .*`override /verify: NAME`",
    ):
        manifest_of("experiment=mine", f"verify={option}", dirs=[site])
    (check,) = manifest_of("experiment=mine", dirs=[site]).groups[0].runs[3].verify
    assert check.batches == 1
    typed = ["verify=eval", "verify.checks=[{type: fidelity, batches: 3}]"]
    (check,) = manifest_of("experiment=mine", *typed, dirs=[site]).groups[0].runs[3].verify
    assert check.batches == 3, "a typed list wins over both files"


def test_compose_experiment_of_a_user_with_single_keys_keeps_the_typed_option(tmp_path):
    site = experiment_folder(tmp_path, "train: {steps: 3}\nverify: {}\n")
    group = manifest_of("experiment=mine", "verify=eval", "train=pretrain", dirs=[site]).groups[0]
    assert [(run.train.steps, [check.type for check in run.verify]) for run in group.runs] == [(3, ["eval", "kvcache"])]


def test_compose_two_options_of_a_group_that_replace_each_other_are_refused():
    with pytest.raises(ConfigError, match=r"verify=\[eval,default\]: conf/verify/default.yaml:\d+ replaces"):
        compose(["verify=[eval,default]"])


@pytest.mark.parametrize(("train", "longest"), [("blockwise", 256), ("upcycle_1b", 2048)])
def test_default_verification_reads_windows_of_training_length(train: str, longest: int) -> None:
    manifest = freeze(["model=tiny_dba", f"train={train}", "verify=default"]).manifest
    sizes = [
        check.block_size
        for run in manifest.groups[0].runs
        for check in run.verify
        if isinstance(check, FidelityVerifyConfig)
    ]
    assert sizes == [longest]
