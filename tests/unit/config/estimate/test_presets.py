"""The presets of conf/model: they compose, validate, fit in width, and cost what the documents say."""

from __future__ import annotations

from fractions import Fraction

import pytest

from caramba.config.estimate import check_widths, model_cost
from caramba.config.kvcache import KVCacheKind
from tests.unit.config.estimate.presets import CONF, PRESETS, compose_model


@pytest.mark.parametrize("preset", PRESETS)
def test_composes_validates_and_fits(preset):
    model = compose_model(preset)
    check_widths(model)
    assert model.name == preset
    assert model_cost(model).params > 0


@pytest.mark.parametrize("preset", PRESETS)
def test_first_line_describes_it(preset):
    first = (CONF / "model" / f"{preset}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ")
    assert 20 < len(first) <= 120


def test_llama_has_exactly_the_published_parameters():
    cost = model_cost(compose_model("llama32_1b"))
    assert cost.params == 1_235_814_400
    assert cost.params_per_part == {
        "embedder": 128256 * 2048,
        "norms": 33 * 2048,
        "attention": 16 * (2 * 2048 * 2048 + 2 * 512 * 2048),
        "feed-forward": 16 * 3 * 2048 * 8192,
        "head": 0,
    }


def test_the_8b_preset_has_exactly_the_published_parameters():
    assert model_cost(compose_model("llama31_8b")).params == 8_030_261_248


def test_llama_block_is_one_sixteenth_of_the_stack():
    block, whole = model_cost(compose_model("llama_block")), model_cost(compose_model("llama32_1b"))
    assert 16 * (block.topology.params - 2048) == whole.topology.params - 2048
    assert block.kv_layers == whole.kv_layers[:1]


@pytest.mark.parametrize(
    ("preset", "fp16", "mixed"),
    [
        ("llama32_dba_per_head", 1792, 632),
        ("llama32_dba", 768, 344),
        ("llama32_dba_384b", 384, 140),
        ("llama32_dba_320b", 320, 106),
    ],
)
def test_cache_bytes_per_token_and_layer(preset, fp16, mixed):
    model = compose_model(preset)
    teacher, student = model_cost(model.teacher.manifest), model_cost(model)
    assert set(teacher.kv_bytes_per_layer(KVCacheKind.FP16)) == {2048}
    assert set(student.kv_bytes_per_layer(KVCacheKind.FP16)) == {fp16}
    assert set(student.kv_bytes_per_layer(KVCacheKind.MIXED)) == {mixed}
    assert student.kv_bytes_per_token(KVCacheKind.FP16) == 16 * fp16


def test_documented_ratios_of_the_headline():
    model = compose_model("llama32_dba_384b")
    teacher, student = model_cost(model.teacher.manifest), model_cost(model)
    full = teacher.kv_bytes_per_token(KVCacheKind.FP16)
    assert full / student.kv_bytes_per_token(KVCacheKind.FP16) == Fraction(16, 3)
    assert float(full / student.kv_bytes_per_token(KVCacheKind.MIXED)) == pytest.approx(14.6, abs=0.05)
    assert float(full / teacher.kv_bytes_per_token(KVCacheKind.Q4_0)) == pytest.approx(3.56, abs=0.01)


def test_teacher_nests_and_names_its_checkpoint():
    model = compose_model("llama32_dba_320b")
    assert model.teacher.checkpoint == "meta-llama/Llama-3.2-1B"
    assert model.teacher.manifest.name == "llama32_1b"
    assert (model.surgery.method, model.surgery.sem_dim, model.surgery.geo_dim) == ("dba", 128, 32)


def test_one_override_sets_the_student_and_its_surgery():
    model = compose_model("llama32_dba", "model.surgery.geo_dim=64")
    assert model_cost(model).kv_layers == model_cost(compose_model("llama32_dba_384b")).kv_layers


def test_student_changes_nothing_but_attention():
    for preset in PRESETS:
        model = compose_model(preset)
        if model.teacher is None:
            continue
        teacher, student = model_cost(model.teacher.manifest), model_cost(model)
        rest = [
            [(leaf.type, leaf.params, runs) for leaf, runs, _ in cost.topology.leaves() if not leaf.attention]
            for cost in (teacher, student)
        ]
        assert rest[0] == rest[1]
        assert (teacher.embedder_params, teacher.head_params) == (
            student.embedder_params,
            student.head_params,
        )


@pytest.mark.parametrize("preset", ["tiny_dba", "tiny_dba_per_head"])
def test_tiny_is_about_a_million_and_its_students_cache_a_quarter(preset):
    model = compose_model(preset)
    teacher, student = model_cost(model.teacher.manifest), model_cost(model)
    assert 0.8e6 < teacher.params < 1.3e6
    assert 4 * student.topology.kv_elements_per_token == teacher.topology.kv_elements_per_token
