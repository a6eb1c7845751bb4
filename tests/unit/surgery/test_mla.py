"""Students of multi-head latent attention: a normalised latent, a standard rotary grid, no biases."""

from __future__ import annotations

import pytest
import torch

from caramba.config.model import ModelSpec, SurgeryConfig
from caramba.distill import block_errors
from caramba.model import build_model
from caramba.surgery import Calibration, pair_attention, transplant
from caramba.surgery.algebra import Grid, match_grid, mean_rotations, nearest_pairs
from caramba.surgery.dba import split_keys
from caramba.surgery.held_out import sink_token
from caramba.surgery.latent import latent_maps
from tests.unit.surgery.models import DIM, KV, calibrated, latent_spec, make_teacher, per_head_spec, tokens

pytestmark = pytest.mark.usefixtures("without_gradients")
SURGERY = SurgeryConfig(method="dba", target="mla")


def mla_spec(sem: int, geo: int, **extra: object) -> ModelSpec:
    return latent_spec(sem, geo, mla=True, **extra)


@pytest.mark.parametrize("options", [{}, {"rope_base": 500.0}], ids=str)
def test_full_width_is_the_teacher_where_the_norm_is_linear(options: dict[str, object]) -> None:
    teacher = make_teacher(n_kv_heads=1, **options)
    widths = mla_spec(2 * DIM, DIM, n_kv_heads=1, latent_norm_eps=1e12, **options)
    student = build_model(widths, seed=9).double().eval()
    transplant(teacher, student, SURGERY, calibrated(teacher))
    x = torch.randn(2, 11, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for _, source, target in pair_attention(teacher, student):
        found, wanted = target(x), source(x)
        assert float((found - wanted).norm() / wanted.norm()) < 1e-9
    text = tokens(2, 19, 7)
    torch.testing.assert_close(student(text), teacher(text), rtol=1e-6, atol=1e-6)


def test_the_latent_has_mean_square_one_and_the_report_tells_the_error(calibration: Calibration) -> None:
    teacher = make_teacher()
    student = build_model(mla_spec(12, DIM), seed=9).double().eval()
    report = transplant(teacher, student, SURGERY, calibration := calibrated(teacher))
    sizes: list[torch.Tensor] = []
    layer = student.attention_layers()[0][1]
    layer.projection.c.register_forward_hook(lambda module, args, output: sizes.append(output))
    held = calibration.of(teacher.attention_layers()[0][1])[1]
    student(tokens(24, 24, 1))
    assert float(sizes[0].pow(2).mean()) == pytest.approx(1.0, rel=1e-6)
    # what the report says of a layer is what the layer itself does on the same windows
    text = tokens(6, 24, 2)
    measured = block_errors(teacher, pair_attention(teacher, student), text)
    assert held is not None
    assert report.layers[0].error == pytest.approx(measured[0], rel=0.3)


def test_it_costs_little_against_free_frequencies_and_biases() -> None:
    teacher = make_teacher()
    calibration, text, found = calibrated(teacher), tokens(6, 24, 2), {}
    for name, spec in {"caramba": latent_spec(16, DIM), "mla": mla_spec(16, DIM)}.items():
        student = build_model(spec, seed=9).double().eval()
        transplant(teacher, student, SURGERY, calibration)
        found[name] = sum(block_errors(teacher, pair_attention(teacher, student), text))
    # one component of each frequency, of two heads': some loss, far from that of random weights
    assert found["caramba"] < found["mla"] < 2 * found["caramba"]


def test_a_grid_gives_each_frequency_the_component_that_it_serves_best() -> None:
    theirs = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64)
    grid = Grid(torch.tensor([1.0, 0.03], dtype=torch.float64), theirs)
    distances = torch.tensor([0.0, 3.0, 9.0], dtype=torch.float64)
    rotation = torch.exp(1j * theirs[:, None] * distances).mean(1, keepdim=True)
    means = mean_rotations(rotation, grid)[..., 0]
    assert means[0, 0] == 1  # the teacher's own frequency
    between = rotation[2] + (0.02 - 0.01) / (0.1 - 0.01) * (rotation[1] - rotation[2])
    assert means[2, 1] == pytest.approx(between.conj()[0].item())  # slower than the grid's: turns back
    assert means[1, 1].imag > 0
    saved = torch.tensor([[5.0, 4.0], [3.0, 1.0], [2.0, 2.5]])
    assert match_grid(saved).tolist() == [0, 2]
    nearest = nearest_pairs(grid, 2)[..., 0].real
    assert nearest.tolist() == [[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]]  # 0.03 is nearer to 0.01 than to 0.1


@pytest.mark.parametrize("target", ["caramba", "mla"])
def test_a_narrow_latent_keeps_the_attention_sink(target: str) -> None:
    teacher = make_teacher()
    layer = teacher.attention_layers()[0][1]
    statistics, held = calibrated(teacher).of(layer)
    eps = 1e12 if target == "mla" else None
    geometry = split_keys(layer, statistics, 4)
    # a sink that lies where the tokens' own directions are weakest
    weakest = torch.linalg.eigh(statistics.covariance)[1][:, 0]
    sink = statistics.mean + 20 * weakest
    lost = []
    for known in (None, sink):
        maps = latent_maps(layer, statistics, geometry, statistics.queries, 6, 1.0, eps, None, known)
        n, y = KV * DIM, sink - maps.mean
        values = (y @ maps.latent @ maps.value).flatten() + maps.mean[n:] - sink[n:]
        lost.append(float(values.norm()))
    assert lost[1] < 0.6 * lost[0]
    first = sink_token(held)
    wanted = torch.cat((held.k[:, :, 0].flatten(1), held.v[:, :, 0].flatten(1)), 1).mean(0)
    torch.testing.assert_close(first, wanted.double())


def test_decode_with_a_cache_equals_the_whole_forward() -> None:
    student = build_model(mla_spec(12, 6), seed=9).eval()
    text = tokens(2, 14, 8)
    whole = student(text)
    for chunks in (((0, 7), (7, 8), (8, 14)), tuple((i, i + 1) for i in range(14))):
        context = student.new_context(2, 14)
        pieces = torch.cat([student(text[:, start:stop], context) for start, stop in chunks], 1)
        torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-4)


def test_gradients_reach_every_weight() -> None:
    student = build_model(mla_spec(12, 6), seed=9)
    with torch.enable_grad():
        student(tokens(2, 14, 8)).square().mean().backward()
    for name, parameter in student.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    assert not any(name.endswith(("c.bias", "out.bias", "inv_freq")) for name in student.state_dict())


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"null_attn": True}, "null_attn=True .* set null_attn: false"),
        ({"exact_first_tokens": 4}, "exact_first_tokens=4 .* set exact_first_tokens: 0"),
        ({"local_window": 8}, "local_window=8 .* set local_window: null"),
        ({"decoupled_gate": True}, "set decoupled_gate: false"),
        ({"learned_temperature": True}, "set learned_temperature: false"),
        ({"bias": "qkv"}, "bias=qkv .* set bias: false"),
        ({"rope_enabled": False}, "mla needs rope_enabled: true"),
    ],
)
def test_what_engines_lack_is_refused_by_its_key(extra: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        mla_spec(12, 2 * KV, **extra)


def test_heads_of_their_own_are_refused() -> None:
    with pytest.raises(ValueError, match="mla needs layout: latent, got layout=per_head"):
        per_head_spec(12, 2 * KV, 12, mla=True)
