"""Composition, refusals and error texts, in this process."""

# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.config.crosscheck import cross_check
from caramba.errors import CheckpointError, ConfigError
from caramba.launch.axes import points
from caramba.launch.compose import compose, default_groups
from caramba.launch.freeze import freeze
from caramba.launch.groups import conf_root, groups
from caramba.launch.preflight import check_weights


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    """Every test runs in an empty folder and must leave it empty, unless it writes there itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def manifest_of(*overrides, dirs=()):
    return freeze(list(overrides), dirs).manifest


def test_no_arguments_lower_to_one_group_of_four_phases_and_a_control():
    manifest = manifest_of()
    assert manifest.name == "tiny_dba_upcycle"
    (group,) = manifest.groups
    ids = ["pretrain", "blockwise", "drift", "global", "teacher_continued"]
    assert (group.name, [run.id for run in group.runs]) == ("quick", ids)
    assert [run.train.trains for run in group.runs] == ["teacher", "student", "student", "student", "teacher"]
    assert [run.train.control for run in group.runs] == [False, False, False, False, True]
    assert group.runs[3].train.objective == "kl"
    assert [len(run.verify) for run in group.runs] == [0, 0, 0, 2, 0]
    assert {run.train.seed for run in group.runs} == {1337}
    assert not list(Path.cwd().iterdir())


def test_every_group_is_in_the_defaults_list_so_no_plus_is_needed():
    assert sorted(default_groups()) == sorted(groups())
    assert manifest_of("+debug=fdr") == manifest_of("debug=fdr")


def test_every_option_says_what_it_is():
    from caramba.launch.groups import description

    missing = [
        str(file) for options in groups().values() for file in options.values() if not description(file)
    ]
    assert missing == []


def test_train_key_holds_for_all_phases_and_a_phase_key_typed_by_the_user_wins():
    manifest = manifest_of(
        "train.steps=30", "train.phases.blockwise.steps=10", "seed=7", "train.phases.global.seed=8"
    )
    runs = manifest.groups[0].runs
    assert [run.train.steps for run in runs] == [30, 10, 30, 30, 70], "a control sees the student's tokens"
    assert [(run.seed, run.train.seed) for run in runs] == [(7, 7), (7, 7), (7, 7), (8, 8), (7, 7)]


def test_a_phase_mapping_typed_by_the_user_wins_too():
    runs = manifest_of("train.steps=30", "train.phases.blockwise={steps: 10}").groups[0].runs
    assert [run.train.steps for run in runs] == [30, 10, 30, 30, 70]


def test_aliases_replace_the_canonical_key_of_a_preset():
    runs = manifest_of("train.phases.pretrain.seq_len=64", "train.accumulate=2").groups[0].runs
    assert [run.train.block_size for run in runs] == [64, 128, 128, 128, 128]
    assert {run.train.gradient_accumulation_steps for run in runs} == {2}


def test_either_name_replaces_the_alias_of_a_preset():
    words = ("model=llama32_1b", "+train.phases.global.objective=ce", "data.vocab_size=128256")
    for name in ("accumulate", "gradient_accumulation_steps"):
        found = manifest_of("train=upcycle_1b", *words, "~train.phases.blockwise", "~train.phases.drift",
            "~train.phases.teacher_continued", f"train.{name}=3").groups[0].runs  # fmt: skip
        assert {run.train.gradient_accumulation_steps for run in found} == {3}


def test_a_wrong_item_of_a_list_that_could_be_one_name_is_one_problem():
    with pytest.raises(ConfigError, match=r"^settings.instrument\[1\]: got 'hdf', .*did you mean 'hdf5'"):
        manifest_of("settings.instrument=[plot,hdf]")


@pytest.mark.parametrize("name", ["accumulate", "gradient_accumulation_steps"])
def test_either_name_deletes_what_a_preset_set(name: str):
    train = compose(["train=upcycle_1b", f"~train.{name}", "~train.phases.global.lr"]).tree["train"]
    assert not {"accumulate", "gradient_accumulation_steps"} & train.keys()
    assert "lr" not in train["phases"]["global"]
    with pytest.raises(
        ConfigError,
        match=r"~train.accumulate: no file sets gradient_accumulation_steps or accumulate there",
    ):
        compose(["~train.accumulate"])


def test_the_tree_as_composed_keeps_both_names_and_the_resolved_one_has_one():
    composed = compose(["train=upcycle_1b", "train.gradient_accumulation_steps=3"])
    names = {"accumulate", "gradient_accumulation_steps"}
    assert names <= composed.raw["train"].keys()
    assert names & composed.tree["train"].keys() == {"gradient_accumulation_steps"}


def test_a_shorter_run_takes_its_preset_warm_up_along_and_a_typed_one_is_kept():
    assert {run.train.warmup_steps for run in manifest_of("train.steps=3").groups[0].runs} == {0}
    with pytest.raises(
        ConfigError, match=r"warmup_steps=4 exceeds steps=3.*command line: train.warmup_steps=4"
    ):
        manifest_of("train=pretrain", "model=tiny", "train.steps=3", "train.warmup_steps=4")


def test_settings_take_effect():
    words = ("settings.save_every=5", "settings.eval_iters=6", "settings.wandb=true", "settings.val_frac=0.2")
    manifest = manifest_of(*words, "train.phases.global.save_every=9")
    assert [run.train.save_every for run in manifest.groups[0].runs] == [5, 5, 5, 9, 5]
    assert {run.train.eval_every for run in manifest.groups[0].runs} == {6}
    assert manifest.logger.wandb is True
    assert manifest.groups[0].data.val_frac == 0.2
    assert manifest_of("settings.tokenizer=byte").groups[0].data.tokenizer == "byte"
    assert manifest_of("defaults.save_every=4").settings.save_every == 4


def test_device_seed_and_debug_reach_every_phase():
    runs = manifest_of("device=cpu", "debug=fdr").groups[0].runs
    assert [(run.train.device, run.train.steps) for run in runs] == [("cpu", 1)] * 5
    assert manifest_of("debug=overfit").debug.overfit_batches == 2


def test_smoke_is_three_steps_of_everything():
    group = manifest_of("experiment=smoke").groups[0]
    assert [(run.train.steps, run.train.block_size) for run in group.runs] == [*[(3, 64)] * 4, (9, 64)]
    assert [item.id for item in group.benchmarks] == ["perplexity", "latency", "memory"]


def test_a_model_without_teacher_is_the_student_and_default_checks_are_left_out():
    group = manifest_of("model=tiny", "train=pretrain").groups[0]
    assert group.runs[0].train.trains == "student"
    assert group.runs[0].verify == ()
    assert {item.models for item in group.benchmarks} == {("student",)}
    with pytest.raises(ConfigError, match=r"verify compare compares with a teacher.*verify=none"):
        manifest_of("model=tiny", "train=pretrain", "verify=default")


def test_pretrain_alone_trains_the_student_of_an_upcycled_model():
    assert manifest_of("train=pretrain").groups[0].runs[0].train.trains == "student"


def test_train_none_has_no_runs_but_checks_that_were_asked_for():
    assert manifest_of("train=none").groups[0].runs == ()
    (run,) = manifest_of("train=none", "verify=default").groups[0].runs
    assert (run.id, run.train, bool(run.verify)) == ("check", None, True)


def test_benchmark_none_names_the_group_main():
    assert manifest_of("benchmark=none").groups[0].name == "main"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["trian.steps=3"], r"^trian: unknown key; did you mean 'train'\? \(command line: trian.steps=3\)$"),
        (
            ["+train.step=3"],
            r"^train.step: unknown key; did you mean 'steps'\? \(command line: \+train.step=3\)$",
        ),
        (
            ["model.topology.layers.0.type=AttentionLyer"],
            r"^model.topology.layers\[0\].type: 'AttentionLyer' unknown type; did you mean 'AttentionLayer'\?"
            r".*\(command line: model.topology.layers.0.type=AttentionLyer\)$",
        ),
        (
            ["model.topology.layers[0].type=AttentionLyer"],
            r"layers\[0\].type: 'AttentionLyer' unknown type; did you mean",
        ),
        (
            ["train=blokwise"],
            r"^train: no option 'blokwise'; did you mean 'blockwise'\? options: blockwise, finetune",
        ),
        (["modle=tiny"], r"^modle: unknown key; did you mean 'model'\?"),
        (
            ["train.steps=abc"],
            r"^train.steps: got 'abc', expected a valid integer \(command line: train.steps=abc\)$",
        ),
        (["train.steps=3.5"], r"^train.steps: got 3.5, expected a valid integer"),
        (["train.batch_size=foo"], r"^train.batch_size: got 'foo', expected a valid integer or 'auto' \("),
        (["train.optimizer=adamm"], r"^train.optimizer: got 'adamm', expected .*; did you mean 'adamw'\?"),
        (
            ["train.seq_len=x"],
            r"^train.block_size: got 'x', expected a valid integer \(command line: train.seq_len=x\)",
        ),
        (
            ["train.phases.global.lr=-1"],
            r"^train.phases.global.lr: got -1, expected greater than 0 or 'auto' \(",
        ),
        (
            ["verify.checks.0.type=compere"],
            r"^verify.checks\[0\].type: 'compere' unknown type; did you mean 'compare'\?",
        ),
        (
            ["model.embedder.d_model=96"],
            r"expects width 128, got 96 from the embedder.*\(conf/model/tiny_dba.yaml:\d+\)",
        ),
        (["data.vocab_size=512", "data=stdlib"], None),
        (["seed"], r"'seed' is not an override; write KEY=VALUE"),
        (["seed=1,2"], r"seed=1,2 holds several values; add --multirun"),
        (["name=a/b"], r"^name: "),
        (["foo@bar=x"], r"there is no group 'foo'; groups: benchmark"),
        (["model={a:1}"], r"model is a group, so its value is the name of an option"),
        (["model.topology.layers.99.type=X"], r"cannot compose: .*list index out of range"),
        (["group=paper"], r"write benchmark=paper"),
        (["data=tokens"], r"^data.path: required, and still '\?\?\?'.*\(conf/data/tokens.yaml:3\)"),
        (["model=tiny", "train=blockwise"], r"phase=blockwise needs model.teacher.*model=tiny_dba"),
        (["train.phase=global"], r"train.phase is set beside train.phases"),
        (
            ["model.teacher.manifest.embedder.vocab_size=99"],
            r"vocab_size=2048 differs from model.teacher.*=99",
        ),
    ],
)
def test_errors_name_path_value_nearest_and_place(words, text):
    if text is None:
        frozen = freeze(words)
        with pytest.raises(ConfigError, match=r"vocab_size=2048 does not fit .*vocab_size=512"):
            frozen.check_vocabulary()
        return
    with pytest.raises(ConfigError, match=text):
        freeze(words)
    assert not list(Path.cwd().iterdir())


def test_several_errors_come_together_without_knock_on():
    with pytest.raises(ConfigError) as caught:
        freeze(["train.steps=x", "train.lrr=1", "model.topology.layers=[{type: RMSNrmLayer}]", "seed=a"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 problems:"
    assert [line.split(":")[0].strip() for line in lines[1:]] == [
        "seed",
        "model.topology.layers[0].type",
        "train.lrr",
    ]


def test_more_than_ten_errors_are_counted():
    with pytest.raises(ConfigError, match=r"13 problems:[\s\S]*… and 3 more$"):
        freeze([f"key{number}=1" for number in range(13)])


def test_a_file_is_located_through_packages(tmp_path):
    folder = tmp_path / "mine"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "broken.yaml").write_text(
        "# broken\ndefaults:\n  - tiny@teacher.manifest\n  - tiny\n  - _self_\n\nteacher:\n  manifest:\n"
        "    head:\n      tyed: true\n"
    )
    with pytest.raises(
        ConfigError, match=r"model.teacher.manifest.head.tyed: .*'tied'\? \(mine/model/broken.yaml:10\)"
    ):
        freeze(["model=broken"], [folder])
    text = (conf_root() / "model" / "tiny.yaml").read_text().replace("RMSNormLayer", "RMSNromLayer", 1)
    (folder / "model" / "inner.yaml").write_text(text)
    (folder / "model" / "broken.yaml").write_text(
        "# outer\ndefaults:\n  - tiny\n  - inner@teacher.manifest\n"
    )
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "RMSNromLayer" in row)
    with pytest.raises(
        ConfigError, match=rf"model.teacher.*type: 'RMSNromLayer' .*\(mine/model/inner.yaml:{line}\)"
    ):
        freeze(["model=broken"], [folder])


def test_a_config_dir_adds_options(tmp_path):
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "short.yaml").write_text("# short\nphases: {pretrain: {steps: 5}}\n")
    assert manifest_of("train=short", dirs=[tmp_path / "mine"]).groups[0].runs[0].train.steps == 5


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("model/evil.yaml", "a:\n  b:\n    - _target_: os.system\n", r"evil.yaml:3: _target_ would run code"),
        ("model/evil.yaml", "hydra: {callbacks: {}}\n", r"evil.yaml:1: keys of Hydra's own"),
        ("model/evil.yaml", "hydra.callbacks: {}\n", r"evil.yaml:1: keys of Hydra's own"),
        ("model/evil.yaml", "# @package hydra.callbacks\nx: {}\n", "a package of Hydra's own"),
        ("model/evil.yaml", "defaults:\n  - /hydra/callbacks: x\n", "may neither set Hydra's own groups"),
        ("model/evil.yaml", "defaults:\n  - tiny@hydra.callbacks\n", "may neither set Hydra's own groups"),
        ("model/evil.yaml", "defaults:\n  - ${oc.env:HOME}\n", "may neither set Hydra's own groups nor use"),
        ("hydra/callbacks/x.yaml", "a: 1\n", "groups of Hydra's own"),
        ("model/tiny.yaml", "a: 1\n", "would hide this file; rename it"),
        ("config.yaml", "a: 1\n", "would hide this file; rename it"),
        ("model/x.yml", "a: 1\n", "Hydra reads only"),
        ("model/x.yaml", "a: [1\n", "not YAML"),
        ("model/x.yaml", "# words\n# @package _global_\na: 1\n", "move it to the top"),
    ],
)
def test_user_folders_may_not_run_code_or_be_ignored(tmp_path, name, text, message):
    file = tmp_path / "mine" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        compose([], [tmp_path / "mine"])


@pytest.mark.parametrize(
    "word",
    [
        "model._target_=os.system",
        "+model={_target_: os.system}",
        "vars={a: [{_partial_: true}]}",
        "hydra.callbacks.x={a: 1}",
        "+hydra/callbacks=x",
        "model@hydra.callbacks=tiny",
        "hydra.searchpath=[/tmp]",
    ],
)
def test_the_command_line_may_not_run_code(word):
    with pytest.raises(ConfigError, match=r"would run code|belongs to Hydra"):
        compose([word])


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:HOME}",
        "${oc.create:{a:1}}",
        "${now:%Y}",
        "${hydra:run.dir}",
        "x${oc.env:HOME}",
        "${oc.env}${oc.env:A}",
    ],
)
def test_resolvers_are_refused(value, monkeypatch):
    monkeypatch.setenv("HOME", "a-secret-home")
    with pytest.raises(ConfigError) as caught:
        compose([f"notes='{value}'"])
    assert "a-secret-home" not in str(caught.value)


def test_nested_resolver_names_are_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET", "leaked")
    with pytest.raises(ConfigError) as caught:
        compose(["vars.r=oc.env", "notes='${${vars.r}:SECRET}'"])
    assert "leaked" not in str(caught.value)
    file = tmp_path / "m.yaml"
    file.write_text("vars: {r: oc.env}\nnotes: ${${vars.r}:SECRET}\n")
    with pytest.raises(ConfigError) as caught:
        freeze([f"manifest={file}"])
    assert "leaked" not in str(caught.value)


def test_references_resolve_and_a_bare_var_is_found():
    composed = compose(
        [
            "vars.width=128",
            "vars.twice=${vars.width}",
            "notes='w=${width}'",
            "model.embedder.d_model=${width}",
        ]
    )
    assert composed.tree["notes"] == "w=128"
    assert composed.tree["model"]["embedder"]["d_model"] == 128
    with pytest.raises(
        ConfigError, match=r"^notes: '\$\{vars.widht\}' names a key that does not exist.*did you mean 'width'"
    ):
        compose(["vars.width=128", "notes=${vars.widht}"])
    with pytest.raises(ConfigError, match="refers to itself"):
        compose(["vars.a=${vars.b}", "vars.b=${vars.a}"])


def test_unbuilt_settings_are_refused_by_the_path_that_was_typed():
    frozen = freeze(
        [
            "train.orchestrator_decision_interval=50",
            "benchmark.benchmarks.2.config.quantization_modes=[fp16,auto]",
        ]
    )
    with pytest.raises(ConfigError) as caught:
        frozen.refuse_unbuilt()
    text = str(caught.value)
    assert (
        "train.orchestrator_decision_interval=50 is not built yet: it comes with the optimiser work" in text
    )
    assert "(command line: train.orchestrator_decision_interval=50)" in text
    assert "benchmark.benchmarks[2].config.quantization_modes=[fp16, auto]" in text
    freeze([]).refuse_unbuilt()
    assert freeze(["model=llama32_dba", "train=none"]).unbuilt() == []


def test_llama_without_weights_names_three_ways_on():
    with pytest.raises(CheckpointError) as caught:
        check_weights(manifest_of("model=llama32_dba", "train=blockwise"))
    text = str(caught.value)
    for way in ("hf auth login", "model.teacher.checkpoint=DIR", "model=tiny_dba", "meta-llama/Llama-3.2-1B"):
        assert way in text


def test_llama_in_the_hub_cache_without_all_its_files_is_not_there(tmp_path):
    snapshot = tmp_path / "hf" / "hub" / "models--meta-llama--Llama-3.2-1B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"not in this machine's Hugging Face cache .*HF_HUB_OFFLINE"):
        check_weights(manifest_of("model=llama32_dba", "train=blockwise"))
    (snapshot / "config.json").write_text("{}")
    manifest = check_weights(manifest_of("model=llama32_dba", "train=blockwise"))
    assert manifest.model.teacher.checkpoint == str(snapshot)


def test_a_student_phase_needs_teacher_weights():
    with pytest.raises(
        CheckpointError, match=r"run 'blockwise' needs the teacher's weights[\s\S]*train=upcycle"
    ):
        check_weights(manifest_of("train=blockwise"))
    check_weights(manifest_of("train=upcycle"))
    check_weights(manifest_of("train=pretrain"))


def test_checkpoints_are_found_and_made_absolute(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(b"x")
    manifest = check_weights(manifest_of("train=blockwise", "model.teacher.checkpoint=w.safetensors"))
    assert manifest.model.teacher.checkpoint == str(tmp_path / "w.safetensors")
    with pytest.raises(CheckpointError, match="no such file"):
        check_weights(manifest_of("train=blockwise", "model.teacher.checkpoint=v.safetensors"))
    run = tmp_path / "runs" / "a" / "20260101-000000-00000000"
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="has no finished checkpoint"):
        check_weights(manifest_of("train=blockwise", "model.teacher.checkpoint=runs/a"))
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "global.safetensors").write_bytes(b"x")
    manifest = check_weights(manifest_of("train=blockwise", "model.teacher.checkpoint=runs/a"))
    assert manifest.model.teacher.checkpoint == str(run)


def test_sweeps_expand_to_their_product():
    assert points(["seed=1,2", "train.lr=choice(0.1,0.2)", "name=x"]) == [
        ["seed=1", "train.lr=0.1", "name=x"],
        ["seed=1", "train.lr=0.2", "name=x"],
        ["seed=2", "train.lr=0.1", "name=x"],
        ["seed=2", "train.lr=0.2", "name=x"],
    ]
    assert points(["model=glob(tiny*)"]) == [["model=tiny"], ["model=tiny_dba"], ["model=tiny_dba_per_head"]]
    assert points(["seed=range(1,4)"]) == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert points(["train.phases={a: {steps: 1}}", "+train.betas=[0.9,0.95]"]) == [
        ["train.phases={a: {steps: 1}}", "+train.betas=[0.9,0.95]"]
    ]
    with pytest.raises(ConfigError, match="no finite set of values"):
        points(["train.lr=interval(0,1)"])


def test_a_control_reads_as_many_tokens_as_the_student_whatever_its_batch():
    runs = (
        manifest_of("train.phases.teacher_continued.batch_size=16", "train.phases.global.accumulate=2")
        .groups[0]
        .runs
    )
    student = sum(run.train.tokens for run in runs if run.train.trains == "student")
    assert 0 <= runs[-1].train.tokens - student < 16 * 128
    assert runs[-1].train.tokens > runs[-1].train.batch_size * 128


def test_a_control_needs_a_teacher_with_weights():
    with pytest.raises(ConfigError, match="a control trains the teacher further"):
        manifest_of("train.phases.global.control=true")


def test_the_steps_of_a_control_cannot_be_typed():
    with pytest.raises(ConfigError, match="its steps follow from theirs"):
        manifest_of("train.phases.teacher_continued.steps=5")


def test_a_misspelt_phase_gets_its_nearest_name():
    with pytest.raises(ConfigError, match=r"train.phases.pretrian: unknown phase; did you mean 'pretrain'"):
        manifest_of("train.phases.pretrian.steps=3")


def test_typed_none_empties_what_an_experiment_lists():
    group = manifest_of("experiment=smoke", "benchmark=none", "verify=none").groups[0]
    assert group.benchmarks == ()
    assert not any(run.verify for run in group.runs)


def test_a_teacher_alone_cannot_be_verified():
    with pytest.raises(ConfigError, match="trains the teacher, and verify compares a student"):
        cross_check(
            manifest_of().model_copy(update={"groups": (_verified_teacher(manifest_of().groups[0]),)})
        )


def _verified_teacher(group):
    first = group.runs[0].model_copy(update={"verify": group.runs[3].verify})
    return group.model_copy(update={"runs": (first, *group.runs[1:])})
