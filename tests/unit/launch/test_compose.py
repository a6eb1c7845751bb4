"""What the words of a command line compose to, in this process."""

# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.config.crosscheck import cross_check
from caramba.errors import ConfigError
from caramba.launch.compose import compose, default_groups
from caramba.launch.config_files import groups
from caramba.launch.freeze import freeze
from caramba.launch.overrides import expand_sweep

pytestmark = pytest.mark.usefixtures("empty_folder")


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
    from caramba.launch.config_files import description

    missing = [str(file) for options in groups().values() for file in options.values() if not description(file)]
    assert missing == []


def test_train_key_holds_for_all_phases_and_a_phase_key_typed_by_the_user_wins():
    manifest = manifest_of("train.steps=30", "train.phases.blockwise.steps=10", "seed=7", "train.phases.global.seed=8")
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
    with pytest.raises(ConfigError, match=r"warmup_steps=4 exceeds steps=3.*command line: train.warmup_steps=4"):
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


@pytest.mark.parametrize(
    "words",
    [
        ("settings.wandb=true",),
        ("settings.instrument=wandb",),
        ("settings.instrument=[rich,wandb,jsonl]",),
        ("logger=wandb", "~logger.wandb_mode"),
        ("defaults.wandb=true",),
    ],
)
def test_every_name_of_wandb_freezes_to_one_key(words: tuple[str, ...]):
    assert manifest_of(*words) == manifest_of("logger.wandb=true")


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


def test_a_config_dir_adds_options(tmp_path):
    (tmp_path / "mine" / "train").mkdir(parents=True)
    (tmp_path / "mine" / "train" / "short.yaml").write_text("# short\nphases: {pretrain: {steps: 5}}\n")
    assert manifest_of("train=short", dirs=[tmp_path / "mine"]).groups[0].runs[0].train.steps == 5


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


def test_sweeps_expand_to_their_product():
    assert expand_sweep(["seed=1,2", "train.lr=choice(0.1,0.2)", "name=x"]) == [
        ["seed=1", "train.lr=0.1", "name=x"],
        ["seed=1", "train.lr=0.2", "name=x"],
        ["seed=2", "train.lr=0.1", "name=x"],
        ["seed=2", "train.lr=0.2", "name=x"],
    ]
    assert expand_sweep(["model=glob(tiny*)"]) == [
        ["model=tiny"],
        ["model=tiny_dba"],
        ["model=tiny_dba_per_head"],
        ["model=tiny_memory"],
    ]
    assert expand_sweep(["seed=range(1,4)"]) == [["seed=1"], ["seed=2"], ["seed=3"]]
    assert expand_sweep(["train.phases={a: {steps: 1}}", "+train.betas=[0.9,0.95]"]) == [
        ["train.phases={a: {steps: 1}}", "+train.betas=[0.9,0.95]"]
    ]
    with pytest.raises(ConfigError, match="no finite set of values"):
        expand_sweep(["train.lr=interval(0,1)"])


def test_a_control_reads_as_many_tokens_as_the_student_whatever_its_batch():
    runs = (
        manifest_of("train.phases.teacher_continued.batch_size=16", "train.phases.global.accumulate=2").groups[0].runs
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


def test_typed_none_empties_what_an_experiment_lists():
    group = manifest_of("experiment=smoke", "benchmark=none", "verify=none").groups[0]
    assert group.benchmarks == ()
    assert not any(run.verify for run in group.runs)


def test_a_teacher_alone_cannot_be_verified():
    manifest = manifest_of()
    with pytest.raises(ConfigError, match="trains the teacher, and verify compares a student"):
        cross_check(manifest.model_copy(update={"groups": (_verified_teacher(manifest.groups[0]),)}))


def _verified_teacher(group):
    first = group.runs[0].model_copy(update={"verify": group.runs[3].verify})
    return group.model_copy(update={"runs": (first, *group.runs[1:])})


def test_checkpointing_typed_at_parallel_replaces_a_presets_and_contradicts_a_typed_one():
    words = [
        "model=tiny",
        "train=pretrain",
        "benchmark=none",
        "verify=none",
        "device=cuda_h200",
        "parallel=fsdp2",
    ]
    (run,) = freeze(words).manifest.groups[0].runs
    assert run.train is not None
    assert run.train.activation_checkpointing == "auto", "what the preset says"
    at_parallel = "parallel.activation_checkpointing=selective"
    (run,) = freeze([*words, at_parallel]).manifest.groups[0].runs
    assert run.train is not None
    assert run.train.activation_checkpointing == "selective"
    for typed in (
        "train.use_gradient_checkpointing=full",
        "train.phases.pretrain.activation_checkpointing=full",
    ):
        with pytest.raises(ConfigError, match=r"=selective and train.activation_checkpointing=full of run 'pretrain'"):
            freeze([*words, at_parallel, typed])
    (run,) = freeze([*words, at_parallel, "train.activation_checkpointing=selective"]).manifest.groups[0].runs
    assert run.train is not None
    assert run.train.activation_checkpointing == "selective"
