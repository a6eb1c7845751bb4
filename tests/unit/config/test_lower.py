"""Single-file manifests, round trips, references, the JSON schema."""

# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import json

import pytest

from caramba.config.extension import NodeConfig
from caramba.config.lower import lower_file
from caramba.config.manifest import Manifest, parse_manifest
from caramba.config.resolve import resolve
from caramba.config.schema import json_schema, key_table
from caramba.errors import ConfigError

MODEL = {
    "embedder": {"vocab_size": 300, "d_model": 8},
    "topology": {
        "type": "StackedTopology",
        "layers": [
            {"type": "AttentionLayer", "d_model": 8, "n_heads": 2},
            {
                "type": "NestedTopology",
                "repeat": 2,
                "layers": [{"type": "SwiGLULayer", "d_model": 8, "d_ff": 16}],
            },
        ],
    },
}
DATA = {"type": "stdlib", "vocab_size": 300}
PRETRAIN = {"id": "pre", "train": {"phase": "pretrain", "steps": 20}}


def lower(tree, given=()):
    lowered = lower_file(tree, "mine", given)
    return parse_manifest(lowered.manifest, origins=lowered.origins, typed=tree)


def test_a_manifest_survives_its_json():
    manifest = lower({"model": MODEL, "data": DATA, "runs": [PRETRAIN], "vars": {"a": [1, {"b": None}]}})
    again = parse_manifest(json.loads(manifest.model_dump_json()))
    assert again == manifest
    assert again.model.topology.layers[1].repeat == 2


def test_top_level_runs_are_one_group_called_main():
    manifest = lower(
        {
            "model": MODEL,
            "data": DATA,
            "runs": [
                PRETRAIN,
                {"id": "more", "steps": 5, "seed": 3, "train": {"phase": "global", "steps": 5}},
            ],
            "benchmarks": [{"id": "p", "config": {"type": "perplexity"}}],
            "defaults": {"save_every": 7},
        }
    )
    (group,) = manifest.groups
    assert (manifest.name, group.name, group.data.vocab_size) == ("mine", "main", 300)
    assert [(run.seed, run.train.seed, run.steps, run.train.steps) for run in group.runs] == [
        (1337, 1337, None, 20),
        (3, 3, None, 5),
    ]
    assert [run.train.save_every for run in group.runs] == [7, 7]
    assert group.benchmarks[0].models == ("student",)


def test_groups_share_top_level_data_and_a_text_is_a_token_file():
    groups = [{"name": "quick", "runs": [PRETRAIN]}, {"name": "paper", "data": "x.npy", "runs": [PRETRAIN]}]
    manifest = lower({"model": MODEL, "data": DATA, "groups": groups, "group": "paper"})
    assert [(group.data.type, group.data.path) for group in manifest.groups] == [
        ("stdlib", None),
        ("tokens", "x.npy"),
    ]
    assert [group.name for group in manifest.groups_to_run()] == ["paper"]
    with pytest.raises(
        ConfigError,
        match=r"group='papr' is not a group of this manifest; did you mean 'paper'\? groups: quick, paper",
    ):
        lower({"model": MODEL, "data": DATA, "groups": groups, "group": "papr"})


def test_a_teacher_is_trained_by_the_pretraining_that_others_build_on():
    model = {**MODEL, "teacher": {"manifest": MODEL}}
    runs = [PRETRAIN, {"id": "block", "train": {"phase": "blockwise", "steps": 2}}]
    manifest = lower({"model": model, "data": DATA, "runs": runs, "verify": [{"type": "fidelity"}]})
    assert [run.train.trains for run in manifest.groups[0].runs] == ["teacher", "student"]
    assert [len(run.verify) for run in manifest.groups[0].runs] == [0, 1]
    assert [run.train.trains for run in lower({"model": model, "data": DATA, "runs": [PRETRAIN]}).groups[0].runs] == [
        "student"
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"runs": [{**PRETRAIN, "train": {"phase": "pretrain", "stps": 1}}]},
            r"^runs\[0\].train.stps: unknown key; did you",
        ),
        ({"runs": [{**PRETRAIN, "steps": "x"}]}, "sets steps=x and train.steps=20; keep one"),
        (
            {"runs": [{"id": "a", "steps": "x", "train": {"phase": "pretrain"}}]},
            r"^runs\[0\].steps: got 'x', expected a valid",
        ),
        (
            {"runs": [{**PRETRAIN, "seed": 1}, {**PRETRAIN, "seed": 2}]},
            "two runs of group 'main' are called 'pre'",
        ),
        ({"runs": [], "verify": [{"type": "fidelity"}]}, "no run that it could check"),
        ({"groups": []}, "runs and benchmarks stand at the top of a manifest only when it has no groups"),
        (
            {"benchmarks": [{"id": "p", "config": {"type": "perplexty"}}]},
            r"^benchmarks\[0\].config.type: 'perplexty' unknown",
        ),
        ({"defaults": {"save_evry": 1}}, r"^defaults.save_evry: unknown key; did you mean 'save_every'"),
        ({"data": None}, r"data: (required|got None)"),
        ({"origin": "agent", "plugins": ["x"]}, "may not name plugins"),
        ({"notes": {"_target_": "os.system"}}, r"^notes._target_: _target_ would run code"),
        ({"vars": {"a": [{"_partial_": True}]}}, r"^vars.a\[0\]._partial_: _partial_ would run code"),
    ],
)
def test_file_errors_carry_the_typed_path(change, text):
    tree = {"model": MODEL, "data": DATA, "runs": [PRETRAIN], **change}
    with pytest.raises(ConfigError, match=text):
        lower(tree)


def test_an_alias_and_its_canonical_key_clash():
    train = {"phase": "pretrain", "steps": 2, "compile": False, "compile_model": False}
    plain = {
        "model": MODEL,
        "name": "a",
        "groups": [{"name": "g", "data": DATA, "runs": [{"id": "r", "train": train}]}],
    }
    with pytest.raises(ConfigError, match="compile is another name of compile_model, and both are set"):
        parse_manifest(plain)


def test_every_typo_of_a_mapping_is_reported_at_once():
    plain = {"name": "a", "modle": {}, "grups": []}
    with pytest.raises(ConfigError, match=r"2 problems:\n  modle: .*'model'\?\n  grups: .*'groups'\?"):
        parse_manifest(plain)


def test_references():
    tree = {
        "vars": {"d": 4, "deep": {"x": ["${vars.d}", 2]}},
        "a": {"b": "${d}", "c": "${.b}", "e": {"f": "${..b}", "g": "${vars.deep.x[0]}"}},
        "copy": "${a.e}",
        "through": "${copy.f}",
        "text": "d is ${d}, x is ${vars.deep.x.1}",
    }
    out = resolve(tree)
    assert out["a"] == {"b": 4, "c": 4, "e": {"f": 4, "g": 4}}
    assert out["copy"] == {"f": 4, "g": 4}
    assert out["through"] == 4
    assert out["text"] == "d is 4, x is 2"
    assert tree["a"]["b"] == "${d}"


@pytest.mark.parametrize(
    "value",
    [
        "${oc.env:HOME}",
        "${ oc.env:HOME }",
        "${${r}:X}",
        "${r",
        "${}",
        "a${oc.env:HOME}b",
        "${a.${r}}",
        "${....a}",
    ],
)
def test_references_to_anything_else_fail(value):
    with pytest.raises(ConfigError, match=r"^x\.y\[0\]: "):
        resolve({"r": "oc.env", "x": {"y": [value]}})


def test_json_schema_names_every_node_and_accepts_what_parse_accepts():
    schema = json_schema()
    nodes = {item["$ref"].rsplit("/", 1)[1] for item in schema["$defs"]["Node"]["oneOf"]}
    assert nodes == {node.__name__ for node in NodeConfig.registry.values()}
    assert schema["$defs"]["StackedTopologyConfig"]["properties"]["layers"]["items"] == {"$ref": "#/$defs/Node"}
    assert schema["additionalProperties"] is False
    text = json.dumps(schema)
    for name in schema["$defs"]:
        assert f'"#/$defs/{name}"' in text
    references = {part.split('"')[0] for part in text.split('"#/$defs/')[1:]}
    assert references <= set(schema["$defs"])


def test_key_table_covers_every_manifest_key():
    rows = {(section, key) for section, key, _, _ in key_table()}
    assert {("Manifest", key) for key in Manifest.model_fields} <= rows
    assert ("Phase", "steps") in rows
    assert ("AttentionLayer", "sem_dim") in rows


def test_checkpointing_of_parallel_is_that_of_every_phase_that_says_nothing():
    runs = [
        PRETRAIN,
        {"id": "more", "train": {"phase": "pretrain", "steps": 5, "use_gradient_checkpointing": False}},
    ]
    tree = {"model": MODEL, "data": DATA, "runs": runs}
    manifest = lower({**tree, "parallel": {"strategy": "fsdp2", "activation_checkpointing": True}})
    assert [run.train.activation_checkpointing for run in manifest.groups[0].runs] == ["full", "none"]
    with pytest.raises(ConfigError, match=r"parallel.activation_checkpointing: got 'some', expected 'none'"):
        lower({**tree, "parallel": {"activation_checkpointing": "some"}})


def test_manifests_of_the_first_documents_are_read() -> None:
    """One check in place of a list, and `tokenizer: llama`; an error is at the key that was written."""
    runs = [{"id": "a", "train": {"phase": "pretrain", "steps": 1}, "verify": {"type": "compare", "batches": 2}}]
    tree = {"defaults": {"tokenizer": "llama"}, "data": "tokens.npy", "runs": runs}
    lowered = lower_file(tree, "file", ())
    assert lowered.manifest["settings"]["tokenizer"] == "model"
    assert lowered.manifest["groups"][0]["data"] == {"type": "tokens", "path": "tokens.npy"}
    assert lowered.manifest["groups"][0]["runs"][0]["verify"] == [{"type": "compare", "batches": 2}]
    assert lowered.origins["groups", 0, "runs", 0, "verify", 0] == ("groups", 0, "runs", 0, "verify")
    assert runs[0]["verify"] == {"type": "compare", "batches": 2}


def test_a_tiktoken_encoding_is_its_rank_file() -> None:
    from caramba.config.verify import EvalVerifyConfig

    case = {"id": "a", "kind": "int_greedy", "prompt": "1", "answer": 1}
    made = {"type": "eval", "cases": [case]}
    named = EvalVerifyConfig.model_validate(made | {"tokenizer": {"type": "tiktoken", "encoding": "cl100k_base"}})
    assert named.tokenizer == "cl100k_base.tiktoken"
    with pytest.raises(ValueError, match=r"type: tiktoken, encoding: NAME"):
        EvalVerifyConfig.model_validate(made | {"tokenizer": {"type": "llama"}})
