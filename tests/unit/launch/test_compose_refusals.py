"""What a command line or a folder of configs may not say, and the text of the error."""

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.errors import ConfigError
from caramba.launch.compose import compose
from caramba.launch.config_files import conf_root
from caramba.launch.freeze import freeze
from caramba.launch.overrides import refuse_unsafe_folder

pytestmark = pytest.mark.usefixtures("empty_folder")


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
            r"^train: no option 'blokwise'; did you mean 'blockwise'\? options: blockwise, distill_135m, distill_memory, finetune",
        ),
        (
            ["name='a b'"],
            r"^name: got 'a b', expected letters, digits, .* the first is a letter or a digit \(",
        ),
        (
            ["~benchmark.benchmarks[1]"],
            r"cannot be taken out of it; give the list that is to remain, benchmark.benchmarks=\[...\]",
        ),
        (["modle=tiny"], r"^modle: unknown key; did you mean 'model'\?"),
        (
            ["train.steps=abc"],
            r"^train.steps: got 'abc', expected a valid integer \(command line: train.steps=abc\)$",
        ),
        (["seed=-1"], r"^seed: got -1, expected greater than or equal to 0 \(command line: seed=-1\)$"),
        (["seed=99999999999999999999"], r"^seed: got 9{20}, expected less than 9223372036854775808 \("),
        (["train.seed=-3"], r"^train.seed: got -3, expected greater than or equal to 0 \("),
        (["train.lr=inf"], r"^train.lr: got inf, expected a finite number or 'auto' \("),
        (["train.weight_decay=1e400"], r"^train.weight_decay: got inf, expected a finite number \("),
        (
            ["model.topology.layers.0=7"],
            r"^model.topology.layers\[0\]: expected a mapping with a `type`, such as \{type: RMSNormLayer, d_model: 64\} ",
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
        (["train.phase=global"], r"train.phase is set together with train.phases"),
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
    (folder / "model" / "broken.yaml").write_text("# outer\ndefaults:\n  - tiny\n  - inner@teacher.manifest\n")
    line = next(number for number, row in enumerate(text.splitlines(), 1) if "RMSNromLayer" in row)
    with pytest.raises(ConfigError, match=rf"model.teacher.*type: 'RMSNromLayer' .*\(mine/model/inner.yaml:{line}\)"):
        freeze(["model=broken"], [folder])


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


def test_a_file_of_another_encoding_is_named(tmp_path):
    file = tmp_path / "mine/model/x.yaml"
    file.parent.mkdir(parents=True)
    file.write_bytes("# café\na: 1\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine/model/x\.yaml: not UTF-8 text \(byte 6\); save it as UTF-8"):
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


def test_a_wrong_item_of_a_list_that_could_be_one_name_is_one_problem():
    with pytest.raises(ConfigError, match=r"^settings.instrument\[1\]: got 'hdf', .*did you mean 'hdf5'"):
        freeze(["settings.instrument=[plot,hdf]"])


def test_a_misspelt_phase_gets_its_nearest_name():
    with pytest.raises(ConfigError, match=r"train.phases.pretrian: unknown phase; did you mean 'pretrain'"):
        freeze(["train.phases.pretrian.steps=3"])


def test_a_format_that_a_measurement_chooses_is_refused_by_the_path_that_was_typed():
    word = "benchmark.benchmarks.2.config.quantization_modes=[fp16,auto]"
    with pytest.raises(ConfigError) as caught:
        freeze([word])
    text = str(caught.value)
    assert "benchmark.benchmarks[2].config.quantization_modes[1]: got auto" in text
    assert "name a format, such as fp16 or q8_0" in text
    assert f"(command line: {word})" in text


@pytest.mark.parametrize("entry", ["- 7: standard", "- /optimizer: 7", "- {true: adamw}"])
def test_an_entry_of_a_defaults_list_that_is_no_text_is_refused(tmp_path, entry):
    option = tmp_path / "train" / "mine.yaml"
    option.parent.mkdir()
    option.write_text(f"defaults:\n  {entry}\nsteps: 1\n")
    with pytest.raises(ConfigError, match=r"cannot compose|defaults|mine\.yaml"):
        freeze(["model=tiny", "train=mine", "verify=none", "benchmark=none"], [tmp_path])


def test_a_wrong_reference_is_located_in_a_file_that_only_one_parser_takes(tmp_path):
    file = tmp_path / "m.yaml"
    file.write_text("name: 1\t1\nnotes: {a: 0\t0, b: 0\t}\nmodel: ${nothing.here}\n")
    with pytest.raises(ConfigError, match="nothing"):
        freeze([f"manifest={file}"])


@pytest.mark.parametrize("entries", ["- _self_\n" * 33, "- override /model: [" + "tiny, " * 33 + "]\n"])
def test_a_long_defaults_list_is_refused_before_hydra_reads_it(tmp_path: Path, entries: str) -> None:
    folder = tmp_path / "conf" / "train"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(f"defaults:\n{entries}steps: 3\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: a defaults list that names 33 options, expected at most 32"):
        refuse_unsafe_folder(tmp_path / "conf")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("vars.a=" + "[" * 100 + "]" * 100, r"^command line: vars\.a: nests deeper than 64 levels"),
        ("vars.a=" + "{b: " * 70 + "1" + "}" * 70, r"^command line: vars\.a: nests deeper than 64 levels"),
        ("seed=" + "9" * 101, r"^command line: seed: a whole number of more than 100 digits"),
        ("vars.a=[1, " + "9" * 400 + "]", r"^command line: vars\.a: a whole number of more than 100 digits"),
        ("seed=" + "9" * 5_000, r"^command line: cannot read .*5,005 characters.*Exceeds the limit"),
        ("benchmark.benchmarks=[{id: " + "n" * 101 + "}]", r"id: String should have at most 100 characters"),
    ],
)
def test_compose_refuses_an_override_that_is_deep_or_giant(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:  # the first was a RecursionError of 25,916 characters
        freeze(["model=tiny", "train=pretrain", word])
    assert len(str(caught.value)) < 1_000
