"""What surgery measures of a teacher: the statistics of the definition, over text, documents and layers, kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from caramba.config.model import ModelSpec
from caramba.errors import CheckpointError
from caramba.layer.rope import rotate
from caramba.model import Model, build_model
from caramba.surgery import Calibration, CalibrationText, calibrate
from caramba.surgery import collect as collect_module
from caramba.surgery import held_out as held_out_module
from caramba.surgery.algebra import key_moments
from caramba.surgery.collect import collect_statistics, mean_rotation, pack, project_without_rope, unpack
from caramba.surgery.dba import split_keys
from caramba.surgery.held_out import capture, latent_output, per_head_output
from caramba.surgery.latent import latent_maps
from caramba.surgery.per_head import per_head_maps
from tests.unit.surgery.models import DIM, KV, loud, make_teacher, spec, tokens

pytestmark = pytest.mark.usefixtures("without_gradients")
FULL = KV * DIM


def test_statistics_are_those_of_the_definition(teacher: Model, calibration: Calibration) -> None:
    _, layer = teacher.attention_layers()[0]
    x = teacher.topology.layers[0].layers[0].layers[0](teacher.embedder(tokens(24, 24, 1)))
    q, k, v = project_without_rope(layer, x)
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


def test_damaged_weights_are_named_with_layer_and_batch() -> None:
    teacher = make_teacher()
    name, layer = teacher.attention_layers()[1]
    with torch.no_grad():
        layer.projection.k.weight[0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=rf"calibration of {name}: batch 0 gave values that are not finite"):
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


@pytest.mark.parametrize("damage", [lambda body: body[: len(body) // 2], lambda body: body[:-9] + b"x" + body[-8:]])
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


def test_rotations_come_from_windows_spread_over_the_text(teacher: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "BATCH_TOKENS", 12)  # one window a batch
    windows, layers = tokens(9, 12, 4), teacher.attention_layers()
    found = collect_statistics(teacher, layers, windows, rotation_windows=3)
    from_these = collect_statistics(teacher, layers, windows[[0, 3, 6]])
    for mine, other in zip(found, from_these, strict=True):
        torch.testing.assert_close(mine.rotation, other.rotation)
