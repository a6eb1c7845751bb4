"""The full method: exact where nothing is cut, better with more width, blind to absolute positions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.config.surgery import attention_configs, check_pair
from caramba.distill import block_errors
from caramba.errors import CheckpointError, ConfigError
from caramba.layer.rope import rotate
from caramba.model import Model, build_model
from caramba.upcycle import (
    Calibration,
    CalibrationText,
    calibrate,
    check_models,
    pair_attention,
    transplant,
)
from caramba.upcycle import collect as collect_module
from caramba.upcycle import held_out as held_out_module
from caramba.upcycle.algebra import key_moments, select_geometry
from caramba.upcycle.collect import collect_statistics, mean_rotation
from caramba.upcycle.dba import split_keys
from caramba.upcycle.held_out import capture, latent_output, per_head_output
from caramba.upcycle.latent import latent_maps
from caramba.upcycle.per_head import per_head_maps
from caramba.upcycle.statistics import pack, unpack, unrotated
from tests.unit.upcycle.models import (
    DIM,
    KV,
    calibrated,
    latent_spec,
    loud,
    make_teacher,
    per_head_spec,
    spec,
    tokens,
)

FULL = KV * DIM
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DBA = SurgeryConfig(method="dba")


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def teacher() -> Model:
    return make_teacher()


@pytest.fixture(scope="module")
def calibration(teacher: Model) -> Calibration:
    return calibrated(teacher)


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
    pieces = torch.cat(
        [student(text[:, start:stop], context) for start, stop in ((0, 7), (7, 8), (8, 14))], 1
    )
    torch.testing.assert_close(pieces, whole, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["latent", "per_head"])
def test_error_never_rises_with_rank(layout: str, teacher: Model, calibration: Calibration) -> None:
    for _, layer in teacher.attention_layers():
        state, held = calibration.of(layer)
        for geo in (0, 4, 8):
            if layout == "latent":
                maps = latent_maps(layer, state, split_keys(layer, state, geo), state.queries, 2 * FULL, 1.0)
                found = [held.relative(latent_output(held, maps.narrowed(rank))) for rank in range(4, 33, 4)]
            else:
                ranks = [(r, geo // KV // 2 * 2, r) for r in range(2, DIM + 1, 2)]
                found = [
                    held.relative(
                        per_head_output(
                            held, per_head_maps(layer, state, state.queries, widths, centres_values=True)
                        )
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


def test_statistics_are_those_of_the_definition(teacher: Model, calibration: Calibration) -> None:
    _, layer = teacher.attention_layers()[0]
    x = teacher.topology.layers[0].layers[0].layers[0](teacher.embedder(tokens(24, 24, 1)))
    q, k, v = unrotated(layer, x)
    state, _ = calibration.of(layer)
    pairs = torch.complex(k[..., : DIM // 2], k[..., DIM // 2 :])
    expected = torch.einsum("bgtp,bhtp->pgh", pairs, pairs.conj()) / (24 * 24)
    torch.testing.assert_close(key_moments(state, KV), expected)
    torch.testing.assert_close(state.mean[FULL:], v.mean((0, 2)).flatten())
    cos, sin = layer.projection.rope(0, 24, x.device)
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).repeat_interleave(2, 1).transpose(-1, -2)
    theta = layer.projection.rope.inv_freq[0].double()
    distance = torch.arange(24)[:, None] - torch.arange(24)
    weights = (scores / DIM**0.5).masked_fill(distance < 0, float("-inf")).softmax(-1)
    turns = torch.exp(1j * distance[..., None] * theta)
    rotation = torch.einsum("bhtu,tup->hp", weights.to(turns.dtype), turns)
    found, mass = mean_rotation(layer, q, k)
    torch.testing.assert_close(found, rotation, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(mass, weights.sum((0, 2, 3)).double())
    # Without the first tokens as keys, and with what is left of the attention.
    found, mass = mean_rotation(layer, q, k, first_tokens=3)
    rotation = torch.einsum("bhtu,tup->hp", weights[..., 3:].to(turns.dtype), turns[:, 3:])
    torch.testing.assert_close(found, rotation, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(mass, weights[..., 3:].sum((0, 2, 3)).double())


def test_components_of_one_frequency_are_orthogonal_and_complete(
    teacher: Model, calibration: Calibration
) -> None:
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
        svd = errors(
            teacher, student_of(teacher, widths, calibration, SurgeryConfig(method="weight_svd")), text
        )
        assert dba < svd


def test_damaged_weights_are_named_with_layer_and_batch() -> None:
    teacher = make_teacher()
    name, layer = teacher.attention_layers()[1]
    with torch.no_grad():
        layer.projection.k.weight[0, 0] = float("nan")
    with pytest.raises(
        CheckpointError, match=rf"calibration of {name}: batch 0 gave values that are not finite"
    ):
        calibrate(teacher, CalibrationText(tokens(2, 8, 1), tokens(1, 8, 2)))
    with pytest.raises(CheckpointError, match=rf"held-out text gave values in {name} that are not finite"):
        capture(teacher, teacher.attention_layers(), tokens(1, 8, 2))


def test_a_second_surgery_reads_the_first_ones_statistics(teacher: Model, tmp_path: Path) -> None:
    text = CalibrationText(tokens(4, 16, 1), tokens(1, 16, 2))
    said: list[str] = []
    first = calibrate(teacher, text, cache=tmp_path, progress=said.append)
    again = calibrate(teacher, text, cache=tmp_path, progress=said.append)
    other = calibrate(make_teacher(seed=4), text, cache=tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert [line for line in said if "read from" in line]
    for one, two in zip(first.statistics, again.statistics, strict=True):
        assert torch.equal(one.moment, two.moment)
        assert torch.equal(one.rotation, two.rotation)
    assert not torch.equal(first.statistics[0].moment, other.statistics[0].moment)
    calibrate(teacher, CalibrationText(tokens(4, 16, 7), text.held_out), cache=tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3, "other text is measured"


@pytest.mark.parametrize(
    "damage", [lambda body: body[: len(body) // 2], lambda body: body[:-9] + b"x" + body[-8:]]
)
def test_damaged_statistics_are_measured_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher, text = make_teacher(), CalibrationText(tokens(2, 9, 1), tokens(1, 9, 2))
    first = calibrate(teacher, text, cache=tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    again = calibrate(teacher, text, cache=tmp_path)
    assert "is damaged; measuring again" in "".join(capsys.readouterr()).replace("\n", " ")
    assert file.read_bytes() == whole
    assert torch.equal(again.statistics[1].queries, first.statistics[1].queries)


def test_statistics_in_a_mapped_file_are_read_at_whole_complex_numbers(teacher: Model) -> None:
    state = collect_statistics(teacher, teacher.attention_layers(), tokens(2, 9, 1))
    shifted = {}
    for name, tensor in pack(state).items():
        memory = torch.zeros(tensor.numel() + 2, dtype=torch.float64)
        start = 1 if memory.data_ptr() % 16 == 0 else 2
        shifted[name] = memory[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
    assert shifted["0.rotation"].data_ptr() % 16 == 8
    for read, written in zip(unpack(shifted), state, strict=True):
        assert read.rotation.data_ptr() % 16 == 0
        assert torch.equal(read.rotation, written.rotation)


def test_what_does_not_fit_is_measured_layer_by_layer(
    teacher: Model, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_module, "ACCUMULATOR_BYTES", 1)
    monkeypatch.setattr(held_out_module, "KEPT_BYTES", 0)
    said: list[str] = []
    text = CalibrationText(tokens(24, 24, 1), tokens(6, 24, 2))
    apart = calibrate(teacher, text, progress=said.append)
    assert said == ["calibration: layers 0 to 0 of 2", "calibration: layers 1 to 1 of 2"]
    for one, two in zip(apart.statistics, calibration.statistics, strict=True):
        assert torch.equal(one.moment, two.moment)
        assert torch.equal(one.rotation, two.rotation)
    for mine, other in zip(apart.held_out, calibration.held_out, strict=True):
        assert torch.equal(mine.k, other.k)
        assert torch.equal(mine.output, other.output)


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
def test_what_cannot_be_mapped_is_refused(
    theirs: dict[str, object], ours: dict[str, object], message: str
) -> None:
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


def test_documents_are_measured_apart_and_padding_not_at_all(teacher: Model) -> None:
    ids = torch.tensor([[0] * 9 + [1] * 5 + [-1] * 4])
    row = tokens(1, 18, 4)
    layers = teacher.attention_layers()
    alone = [row[:, :9], row[:, 9:14]]
    packed = collect_statistics(teacher, layers, row, documents=ids)
    parts = [collect_statistics(teacher, layers, part) for part in alone]
    for index, found in enumerate(packed):
        for name in ("moment", "mean", "queries", "rotation"):
            first, second = (getattr(part[index], name) for part in parts)
            torch.testing.assert_close(getattr(found, name), (9 * first + 5 * second) / 14, msg=name)
    held = capture(teacher, layers, row, ids)
    singles = [capture(teacher, layers, part) for part in alone]
    for index, (_, layer) in enumerate(layers):
        state = packed[index]
        latent = latent_maps(layer, state, split_keys(layer, state, 4), state.queries, 6, 1.0)
        per_head = per_head_maps(layer, state, state.queries, (3, 2, 4), centres_values=True)
        for output, maps in ((latent_output, latent), (per_head_output, per_head)):
            found = output(held[index], maps)  # type: ignore[arg-type]
            each = [single[index] for single in singles]
            apart = [output(one, maps) for one in each]  # type: ignore[arg-type]
            torch.testing.assert_close(found[:, :14], torch.cat(apart, 1))
            off = sum(float((mine - one.output).pow(2).sum()) for mine, one in zip(apart, each, strict=True))
            whole = sum(float(one.output.pow(2).sum()) for one in each)
            assert held[index].relative(found) == pytest.approx((off / whole) ** 0.5)


def test_a_layer_that_runs_twice_is_measured_twice() -> None:
    described = spec(1).model_dump(mode="json")
    block = described["topology"]["layers"][0]["layers"]
    described["topology"]["layers"][0] = {"type": "CyclicTopology", "n_cycles": 2, "layers": block}
    twice = loud(build_model(ModelSpec.model_validate(described), seed=3)).double().eval()
    ids = torch.tensor([[0] * 6 + [1] * 4 + [-1] * 2]).expand(3, -1)
    (held,) = capture(twice, twice.attention_layers(), tokens(3, 12, 4), ids)
    state = collect_statistics(twice, twice.attention_layers(), tokens(3, 12, 4), documents=ids)[0]
    assert held.output.shape[0] == 6
    geometry = split_keys(held.layer, state, FULL)
    maps = latent_maps(held.layer, state, geometry, state.queries, 2 * FULL, 1.0)
    assert held.relative(latent_output(held, maps)) < 1e-6


def test_rotations_come_from_windows_spread_over_the_text(
    teacher: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect_module, "BATCH_TOKENS", 12)  # one window a batch
    windows, layers = tokens(9, 12, 4), teacher.attention_layers()
    found = collect_statistics(teacher, layers, windows, rotation_windows=3)
    from_these = collect_statistics(teacher, layers, windows[[0, 3, 6]])
    for mine, other in zip(found, from_these, strict=True):
        torch.testing.assert_close(mine.rotation, other.rotation)
