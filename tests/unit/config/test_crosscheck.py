from __future__ import annotations

from typing import Any

import pytest

from caramba.config.crosscheck import cross_check
from caramba.config.manifest import Manifest, RunConfig
from caramba.config.surgery import keeps_copied
from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError

POSITIONS = 32
NORM = {"type": "RMSNormLayer", "d_model": 8}


def network(max_positions: int | None) -> dict[str, Any]:
    learned = {"type": "token_position", "max_positions": max_positions} if max_positions else {}
    return {
        "embedder": {"vocab_size": 300, "d_model": 8, **learned},
        "topology": {"type": "StackedTopology", "layers": [NORM]},
    }


def manifest(group: dict[str, Any], student: int | None = POSITIONS, teacher: int | None = POSITIONS) -> Manifest:
    model = {**network(student), "teacher": {"manifest": network(teacher)}}
    data = {"type": "stdlib", "tokenizer": "byte"}
    return Manifest.model_validate({"name": "x", "model": model, "groups": [{"name": "g", "data": data, **group}]})


def run(block_size: int, /, **verify: Any) -> dict[str, Any]:
    train = {"phase": "global", "steps": 1, "batch_size": 1, "block_size": block_size}
    return {"runs": [{"id": "r", "train": train, "verify": [verify] if verify else []}]}


def bench(models: tuple[str, ...] = ("teacher", "student"), **config: Any) -> dict[str, Any]:
    return {"benchmarks": [{"id": "b", "models": models, "config": config}]}


LATENCY = {"type": "latency", "generation_lengths": [3]}


@pytest.mark.parametrize(
    ("fits", "exceeds", "message"),
    [
        (run(32), run(33), "run 'r': block_size=33 exceeds model.embedder.max_positions=32"),
        (
            run(8, type="compare", block_size=32),
            run(8, type="compare", block_size=33),
            "verify compare: block_size=33 exceeds model.embedder",
        ),
        (
            run(8, type="fidelity", block_size=32),
            run(8, type="fidelity", block_size=40),
            "verify fidelity: block_size=40",
        ),
        (
            bench(type="perplexity", block_size=32),
            bench(type="perplexity", block_size=33),
            "benchmark 'b': block_size=33",
        ),
        (
            bench(**LATENCY, prompt_lengths=[4, 30]),
            bench(**LATENCY, prompt_lengths=[4, 31]),
            r"generation_lengths - 1=33 exceeds",
        ),
        (
            bench(type="memory", sequence_lengths=[32]),
            bench(type="memory", sequence_lengths=[8, 64]),
            "sequence_lengths=64 exceeds",
        ),
        (
            run(8, type="kvcache", tokens=32),
            run(8, type="kvcache", tokens=33),
            "verify kvcache: tokens=33 exceeds model.embedder",
        ),
        (
            bench(type="accuracy", tasks=["t"], max_length=32),
            bench(type="accuracy", tasks=["t"], max_length=33),
            "benchmark 'b': max_length=33 exceeds model.teacher",
        ),
        (
            bench(("teacher",), type="perplexity", block_size=32),
            bench(("teacher",), type="perplexity", block_size=33),
            "exceeds model.teacher.manifest.embedder.max_positions=32",
        ),
    ],
)
def test_learned_positions_bound_every_sequence(fits: dict[str, Any], exceeds: dict[str, Any], message: str) -> None:
    cross_check(manifest(fits))
    with pytest.raises(ConfigError, match=message):
        cross_check(manifest(exceeds))
    cross_check(manifest(exceeds, student=None, teacher=None))


def test_only_the_models_that_a_benchmark_reads_are_bound() -> None:
    only_teacher = bench(("teacher",), type="perplexity", block_size=64)
    cross_check(manifest(only_teacher, teacher=None))
    with pytest.raises(ConfigError, match=r"model\.teacher\.manifest"):
        cross_check(manifest(only_teacher, student=None))


def test_what_is_read_in_parts_stays_within_dynamic_scaling() -> None:
    scaling = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    layer = {"type": "AttentionLayer", "d_model": 8, "n_heads": 2, "rope_scaling": scaling}
    student = network(None) | {"topology": {"type": "StackedTopology", "layers": [layer]}}

    def check(**config: Any) -> None:
        groups = [{"name": "g", "data": {"type": "stdlib", "tokenizer": "byte"}, **bench(**config)}]
        model = {**student, "teacher": {"manifest": student}}
        cross_check(Manifest.model_validate({"name": "x", "model": model, "groups": groups}))

    check(**LATENCY, prompt_lengths=[14])
    check(type="perplexity", block_size=64)
    check(type="latency", prompt_lengths=[64], generation_lengths=[1])
    with pytest.raises(ConfigError, match=r"'b': longest .*=17 is read through a cache, .* of the teacher .* 16 "):
        check(**LATENCY, prompt_lengths=[4, 15])
    with pytest.raises(ConfigError, match=r"cache_kind=q8_0, block_size=256 is read through a cache"):
        check(type="perplexity", block_size=256, cache_kind="q8_0")


def latent_manifest(surgery: dict[str, Any], **layout: Any) -> Manifest:
    heads = {"type": "AttentionLayer", "d_model": 8, "n_heads": 2, "head_dim": 4}
    models = [
        {
            "embedder": {"vocab_size": 300, "d_model": 8},
            "topology": {"type": "StackedTopology", "layers": [{**heads, **fields}]},
        }
        for fields in ({"mode": "standard"}, {"mode": "decoupled", **layout})
    ]
    train = {"phase": "blockwise", "steps": 1, "trainable": "maps"}
    return Manifest.model_validate(
        {
            "name": "x",
            "model": {**models[1], "teacher": {"manifest": models[0]}, "surgery": surgery},
            "groups": [
                {
                    "name": "g",
                    "data": {"type": "stdlib", "tokenizer": "byte"},
                    "runs": [{"id": "r", "train": train}],
                }
            ],
        }
    )


def test_maps_alone_train_where_surgery_copied_the_rest() -> None:
    latent = {"layout": "latent", "sem_dim": 6, "geo_dim": 2}
    cross_check(latent_manifest({"method": "dba"}, **latent))
    with pytest.raises(ConfigError, match=r"'r': trainable=maps .* surgery.method=random copies nothing"):
        cross_check(latent_manifest({"method": "random"}, **latent))
    per_head = {"layout": "per_head", "sem_dim": 4, "geo_dim": 4, "v_dim": 8}
    with pytest.raises(ConfigError, match="layer 0 is decoupled, layout=per_head; use trainable=all"):
        cross_check(latent_manifest({"method": "dba"}, **per_head))


def test_auto_leaves_copied_weights_as_they_are_where_surgery_copied_any() -> None:
    auto, told = PhaseConfig(phase="blockwise", steps=1), PhaseConfig(phase="drift", steps=1, trainable="all")
    latent = {"layout": "latent", "sem_dim": 6, "geo_dim": 2}

    def kept(phase: PhaseConfig, manifest: Manifest) -> bool:
        return keeps_copied(phase, manifest.model, manifest.groups[0])

    copied = latent_manifest({"method": "dba"}, **latent)
    assert kept(auto, copied)
    assert not kept(told, copied)
    assert not kept(PhaseConfig(phase="global", objective="kl", steps=1), copied)
    assert not kept(auto, latent_manifest({"method": "random"}, **latent))
    per_head = {"layout": "per_head", "sem_dim": 4, "geo_dim": 4, "v_dim": 8}
    assert not kept(auto, latent_manifest({"method": "dba"}, **per_head))
    # Surgery makes no student whose weights are read, nor one that is trained from scratch first.
    read = copied.model.model_copy(update={"checkpoint": "runs/s"})
    assert not keeps_copied(auto, read, copied.groups[0])
    scratch = RunConfig(id="s", train=PhaseConfig(phase="pretrain", trains="student", steps=1))
    trained = copied.groups[0].model_copy(update={"runs": (scratch, *copied.groups[0].runs)})
    assert not keeps_copied(auto, copied.model, trained)
    # A teacher without a surgery section is transplanted by the default method.
    bare = copied.model.model_copy(update={"surgery": None})
    assert keeps_copied(auto, bare, copied.groups[0])
