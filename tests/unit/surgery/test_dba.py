"""The full method: exact where nothing is cut, better with more width, blind to absolute positions."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.config.surgery import check_pair
from caramba.config.topology import attention_configs
from caramba.distill import block_errors
from caramba.errors import ConfigError
from caramba.model import Model, build_model
from caramba.surgery import Calibration, check_models, pair_attention, transplant
from caramba.surgery.algebra import select_geometry
from caramba.surgery.dba import split_keys
from caramba.surgery.held_out import latent_output, per_head_output
from caramba.surgery.latent import latent_maps
from caramba.surgery.per_head import per_head_maps
from tests.unit.surgery.models import (
    DIM,
    KV,
    calibrated,
    latent_spec,
    make_teacher,
    per_head_spec,
    spec,
    tokens,
)

pytestmark = pytest.mark.usefixtures("without_gradients")
FULL = KV * DIM
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DBA = SurgeryConfig(method="dba")


def student_of(
    teacher: Model, student_spec: ModelSpec, calibration: Calibration, surgery: SurgeryConfig = DBA
) -> Model:
    student = build_model(student_spec, seed=9).double().eval()
    transplant(teacher, student, surgery, calibration)
    return student


def errors(teacher: Model, student: Model, text: Tensor) -> float:
    found = block_errors(teacher, pair_attention(teacher, student), text)
    return sum(found) / len(found)


OPTIONS: list[dict[str, object]] = [
    {},
    {"bias": True},
    {"bias": "qkv"},
    {"local_window": 5},
    {"rope_scaling": YARN},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layout", ["latent", "per_head"])
def test_full_width_is_the_teacher_in_float64(layout: str, options: dict[str, object]) -> None:
    teacher = make_teacher(**options)
    widths = latent_spec(2 * FULL, FULL, **options)
    if layout == "per_head":
        widths = per_head_spec(KV, FULL, FULL, **options)
    student = student_of(teacher, widths, calibrated(teacher))
    text = tokens(2, 19, 7)
    expected = teacher.hidden(text)
    # One ulp of a block grows through softmax and two layers; the single block is held to 1e-12.
    torch.testing.assert_close(student.hidden(text), expected, rtol=1e-8, atol=1e-8)
    x = torch.randn(2, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for _, source, target in pair_attention(teacher, student):
        found, wanted = target(x), source(x)
        assert float((found - wanted).norm() / wanted.norm()) < 1e-12
    logits, wanted = student.float()(text), teacher.float()(text)
    assert float((logits - wanted).abs().max() / wanted.abs().max()) < 1e-4


@pytest.mark.parametrize("layout", ["latent", "per_head"])
def test_without_rotation_the_semantic_path_alone_is_exact(layout: str) -> None:
    teacher = make_teacher(rope_base=1e30)
    for _, layer in teacher.attention_layers():
        layer.projection.rope.inv_freq.zero_()
    calibration = calibrated(teacher)
    widths = latent_spec(2 * FULL, 2) if layout == "latent" else per_head_spec(FULL, 2 * KV, FULL)
    student = student_of(teacher, widths, calibration)
    for _, source, target in pair_attention(teacher, student):
        geometric = target.projection.q_geo_map if layout == "latent" else target.projection.q_geo.weight
        torch.nn.init.zeros_(geometric)  # what is kept of the rotating part must not be needed ...
        state, held = calibration.of(source)
        geometry = split_keys(source, state, 0)
        maps = latent_maps(source, state, geometry, state.queries, 2 * FULL, 1.0)
        per_head = per_head_maps(source, state, state.queries, (DIM, 0, DIM), centres_values=True)
        found = latent_output(held, maps) if layout == "latent" else per_head_output(held, per_head)
        assert held.relative(found) < 1e-12  # ... for without any the block is the teacher's


def test_absorbed_expanded_and_cached_decode_agree(teacher: Model, calibration: Calibration) -> None:
    student = student_of(teacher, latent_spec(12, 6), calibration).float()
    text = tokens(2, 14, 8)
    whole = student(text)
    context = student.new_context(2, 14)
    pieces = torch.cat([student(text[:, start:stop], context) for start, stop in ((0, 7), (7, 8), (8, 14))], 1)
    torch.testing.assert_close(pieces, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["latent", "per_head"])
def test_error_never_rises_with_rank(layout: str, teacher: Model, calibration: Calibration) -> None:
    for _, layer in teacher.attention_layers():
        state, held = calibration.of(layer)
        for geo in (0, 4, 8):
            if layout == "latent":
                maps = latent_maps(layer, state, split_keys(layer, state, geo), state.queries, 2 * FULL, 1.0)
                found = [held.relative(latent_output(held, maps.truncate(rank))) for rank in range(4, 33, 4)]
            else:
                ranks = [(r, geo // KV // 2 * 2, r) for r in range(2, DIM + 1, 2)]
                found = [
                    held.relative(
                        per_head_output(held, per_head_maps(layer, state, state.queries, widths, centres_values=True))
                    )
                    for widths in ranks
                ]
            assert all(after <= 1.03 * before for before, after in itertools.pairwise(found)), found


def test_an_offset_of_all_positions_changes_nothing(teacher: Model, calibration: Calibration) -> None:
    for widths in (latent_spec(10, 6), per_head_spec(4, 4, 8)):
        student = student_of(teacher, widths, calibration)
        layer = student.attention_layers()[0][1]
        x = torch.randn(1, 9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
        found = []
        for offset in (0, 37):
            q, streams = layer.projection(x, offset)
            found.append(layer.projection.attend(q, streams, layer.score))
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)  # angles are float32


def test_cached_bytes_are_those_of_the_widths(teacher: Model, calibration: Calibration) -> None:
    report = transplant(teacher, build_model(latent_spec(10, 6), seed=1).double(), DBA, calibration)
    student = student_of(teacher, latent_spec(10, 6), calibration)
    context = student.new_context(1, 8)
    student.float()(tokens(1, 8, 1), context)
    stored = sum(cache.used_bytes for cache in context.caches) // 4
    assert stored == 8 * sum(layer.cached for layer in report.layers) == 8 * 2 * 16
    assert [layer.teacher_cached for layer in report.layers] == [32, 32]


def test_components_of_one_frequency_are_orthogonal_and_complete(teacher: Model, calibration: Calibration) -> None:
    state, held = calibration.of(teacher.attention_layers()[0][1])
    geometry = select_geometry(state, state.queries, FULL, KV)
    k = held.k.transpose(1, 2).flatten(2)
    q = held.q[:, :KV]
    direct = torch.einsum("bktd,bktd->bt", q, held.k)
    through = torch.einsum("bktd,kde,bte->bt", q, geometry.query, k @ geometry.key)
    torch.testing.assert_close(through, direct)
    torch.testing.assert_close(geometry.residual, torch.zeros_like(geometry.residual), rtol=0, atol=1e-10)


def test_dba_beats_weights_alone_at_every_width(teacher: Model, calibration: Calibration) -> None:
    text = tokens(6, 24, 11)
    for widths in (latent_spec(12, 4), latent_spec(16, 8), per_head_spec(4, 4, 8), per_head_spec(8, 8, 12)):
        dba = errors(teacher, student_of(teacher, widths, calibration), text)
        svd = errors(teacher, student_of(teacher, widths, calibration, SurgeryConfig(method="weight_svd")), text)
        assert dba < svd


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"rope_enabled": False}, {}, "the teacher has rope_enabled: false"),
        ({"qk_norm": True}, {}, "qk_norm cannot be transplanted: it normalises each key"),
        ({"bias": True}, {}, "the student has bias: False; set the student's bias: True"),
        ({"rope_scaling": {"type": "dynamic"}}, {}, "type=dynamic changes its frequencies"),
        ({}, {"sem_dim": 33}, "sem_dim=33 is wider than the teacher, which has 32; use at most 32"),
        ({}, {"geo_dim": 18}, "geo_dim=18 is wider than the teacher, which has 16"),
        ({}, {"head_dim": 4}, "queries are 4 wide, the teacher's 8; set head_dim: 8"),
    ],
)
def test_what_cannot_be_mapped_is_refused(theirs: dict[str, object], ours: dict[str, object], message: str) -> None:
    widths = {"sem_dim": 8, "geo_dim": 4} | ours
    student = spec(1, mode="decoupled", layout="latent", **widths)
    with pytest.raises(ConfigError, match=message):
        check_pair(*(_attention(each) for each in (spec(1, **theirs), student)), DBA)


def _attention(model: ModelSpec) -> AttentionLayerConfig:
    return attention_configs(model.topology)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 1e-3}, r"topology.layers.0.layers.0.layers.0 has eps=0.001, its teacher's 1e-05"),
        ({"d_ff": 40}, r"layers.1.layers.1.\w+.weight has shape .* its teacher has shape"),
    ],
)
def test_other_layers_that_differ_are_refused_without_weights(
    change: dict[str, object], message: str, teacher: Model
) -> None:
    described = latent_spec(8, 4).model_dump(mode="json")
    for residual in described["topology"]["layers"][0]["layers"]:
        for node in residual["layers"]:
            node.update({key: value for key, value in change.items() if key in node})
    student = build_model(ModelSpec.model_validate(described), device="meta")
    with pytest.raises(ConfigError, match=message):
        check_models(teacher, student, DBA)
    check_models(teacher, build_model(latent_spec(8, 4), device="meta"), DBA)
