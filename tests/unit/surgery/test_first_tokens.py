"""Surgery that keeps a sequence's first tokens exact: nothing is lost where nothing is cut, and sinks leave the latent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from caramba.config.layer import AttentionLayerConfig
from caramba.config.model import SurgeryConfig
from caramba.config.surgery import check_pair, first_tokens_apart
from caramba.config.topology import attention_configs
from caramba.distill import block_errors
from caramba.distill.block_loss import attention_log_probabilities
from caramba.errors import ConfigError
from caramba.layer import AttentionLayer, Documents
from caramba.model import Model, build_model
from caramba.surgery import CalibrationText, calibrate, pair_attention, transplant
from caramba.surgery.calibration import calibration_key
from caramba.surgery.collect import collect_statistics, project_without_rope
from tests.unit.surgery.models import DIM, KV, latent_spec, make_teacher, spec, tokens

pytestmark = pytest.mark.usefixtures("without_gradients")
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LENGTH = 24
IDS = torch.tensor([[0] * 9 + [1] * 3 + [2] * 12, [0] * 20 + [-1] * 4])


def student_of(
    teacher: Model, n: int, sem: int, geo: int, *, documents: Tensor | None = None, **extra: Any
) -> tuple[Model, list[float | None]]:
    """A student with `n` exact tokens, calibrated as a launch does it, and its reported errors."""
    student_spec = latent_spec(sem, geo, exact_first_tokens=n, **extra)
    text = CalibrationText(
        tokens(12, LENGTH, 1),
        tokens(2, LENGTH, 2),
        None if documents is None else documents.repeat(6, 1),
        documents,
    )
    student = build_model(student_spec, seed=9).double().eval()
    apart = first_tokens_apart(student_spec.topology)
    report = transplant(
        teacher, student, SurgeryConfig(), calibrate(teacher, text, first_tokens=min(apart, LENGTH - 1))
    )
    return student, [layer.error for layer in report.layers]


@pytest.mark.parametrize(
    ("theirs", "ours", "within"),
    [
        ({}, {}, 1e-12),
        ({"bias": "qkv"}, {"bias": "qkv", "learned_temperature": True, "decoupled_gate": True}, 1e-12),
        ({"rope_scaling": YARN}, {"rope_scaling": YARN}, 1e-12),
        (
            {"rope_scaling": YARN},
            {},
            1e-7,
        ),  # the factor is in float32 in one table, in float64 in the other's weights
        ({"rope_base": 50.0}, {}, 1e-12),
    ],
    ids=["plain", "bias", "yarn", "yarn folded", "base"],
)
def test_a_sequence_of_first_tokens_alone_is_the_teacher(theirs: Any, ours: Any, within: float) -> None:
    teacher = make_teacher(**theirs)
    student, _ = student_of(teacher, LENGTH, 2, 2, **ours)
    text = tokens(3, LENGTH, 5)
    assert max(block_errors(teacher, pair_attention(teacher, student), text)) < within
    torch.testing.assert_close(student(text), teacher(text), rtol=0, atol=1e3 * within)


@pytest.mark.parametrize("documents", [None, IDS], ids=["rows", "documents"])
@pytest.mark.parametrize("n", [1, 4, 10])
def test_whole_keys_behind_first_tokens_are_the_teacher(n: int, documents: Tensor | None) -> None:
    # The geometric part is cut, and rotates nothing at theta = 0: what is centred has to find its mean again.
    teacher = make_teacher(bias="qkv")
    for _, layer in teacher.attention_layers():
        assert layer.projection.rope is not None
        layer.projection.rope.inv_freq.zero_()
    student, reported = student_of(teacher, n, 2 * KV * DIM, 2, documents=documents, bias="qkv")
    text = tokens(2, LENGTH, 5)
    found = block_errors(teacher, pair_attention(teacher, student), text, documents)
    assert max(found) < 1e-9
    assert all(error is not None and error < 1e-9 for error in reported)


@pytest.mark.parametrize("documents", [None, IDS], ids=["rows", "documents"])
def test_the_reported_error_is_that_of_the_layer(documents: Tensor | None) -> None:
    teacher = make_teacher(rope_scaling=YARN)
    student, reported = student_of(teacher, 3, 10, 4, documents=documents)
    windows = tokens(2, LENGTH, 2)
    inputs: dict[str, Tensor] = {}
    for name, layer in teacher.attention_layers():
        layer.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0]}))
    teacher.hidden(windows, documents=documents)
    apart = None if documents is None else Documents.of(documents)
    counted = torch.ones_like(windows, dtype=torch.bool) if documents is None else documents >= 0
    for (name, theirs, ours), error in zip(pair_attention(teacher, student), reported, strict=True):
        wanted, found = (layer(inputs[name], apart)[counted] for layer in (theirs, ours))
        assert error == pytest.approx(float((found - wanted).norm() / wanted.norm()), rel=1e-6)


def test_statistics_leave_the_first_tokens_out() -> None:
    teacher, text = make_teacher(), tokens(2, LENGTH, 3)
    layers = teacher.attention_layers()[:1]
    inputs: list[Tensor] = []
    layers[0][1].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for documents, places in ((None, torch.arange(LENGTH).expand(2, -1)), (IDS, Documents.of(IDS).positions)):
        state = collect_statistics(teacher, layers, text, documents=documents, first_tokens=2)[0]
        q, k, v = project_without_rope(layers[0][1], inputs[-1])
        counted = places >= 2
        counted = counted if documents is None else counted & (documents >= 0)
        y = torch.cat([x.transpose(1, 2).flatten(2)[counted] for x in (k, v)], -1)
        torch.testing.assert_close(state.mean, y.mean(0))
        torch.testing.assert_close(state.moment, y.T @ y / len(y))
        wide = q.transpose(0, 1)[:, counted]
        torch.testing.assert_close(state.queries, wide.mT @ wide / len(y))


def test_statistics_of_first_tokens_alone_are_refused() -> None:
    teacher = make_teacher()
    layers = teacher.attention_layers()
    with pytest.raises(ConfigError, match="windows have 6 tokens, and exact_first_tokens=6 leaves none"):
        collect_statistics(teacher, layers, tokens(2, 6, 1), first_tokens=6)
    ids = torch.arange(3).repeat_interleave(4)[None]
    with pytest.raises(ConfigError, match="no document of the calibration text has more than exact_first_tok"):
        collect_statistics(teacher, layers, tokens(1, 12, 1), documents=ids, first_tokens=4)
    text = CalibrationText(tokens(2, 6, 1), tokens(1, 6, 2))
    assert calibration_key(teacher, text) != calibration_key(teacher, text, 1)


@pytest.mark.parametrize("documents", [None, IDS], ids=["rows", "documents"])
def test_attention_probabilities_are_those_that_the_layer_reads_with(documents: Tensor | None) -> None:
    teacher = make_teacher()
    student, _ = student_of(teacher, 3, 10, 4)
    layer = student.attention_layers()[0][1]
    x = torch.randn(2, LENGTH, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    apart = None if documents is None else Documents.of(documents)
    places = torch.arange(LENGTH).expand(2, -1)
    weights = attention_log_probabilities(layer, x, places, apart).exp()
    assert isinstance(layer, AttentionLayer)
    projection: Any = layer.projection
    _, streams = projection(x)
    values = streams["c"] @ projection.v_up
    first = projection.first.v(x).unflatten(-1, (KV, DIM)).transpose(1, 2).repeat_interleave(2, 1)
    is_first = (places if apart is None else apart.positions) < 3
    heads = weights @ torch.where(is_first[:, None, :, None], first, values)
    torch.testing.assert_close(layer.out(heads.transpose(1, 2).flatten(2)), layer(x, apart))


def test_what_it_cannot_hold_is_refused_by_name() -> None:
    base = {"type": "AttentionLayer", "d_model": 32, "n_heads": 4, "n_kv_heads": 2, "exact_first_tokens": 2}
    latent = {**base, "mode": "decoupled", "layout": "latent", "sem_dim": 4, "geo_dim": 2}
    for extra, text in (
        ({"local_window": 8}, "local_window=8 is not defined with exact_first_tokens=2"),
        ({"null_attn": True}, "null_attn=True is not defined with exact_first_tokens=2"),
        ({"dropout": 0.1}, "dropout=0.1 is not defined with exact_first_tokens=2"),
        ({"head_dim": 7}, "rotates whole heads, which need an even width, got 7"),
        ({"layout": "per_head", "sem_dim": 4, "geo_dim": 4}, "belongs to layout=latent, got layout=per_head"),
        ({"exact_first_tokens": -1}, "greater than or equal to 0"),
    ):
        with pytest.raises(ValueError, match=text):
            AttentionLayerConfig.model_validate({**latent, **extra})
    with pytest.raises(ValueError, match="exact_first_tokens belongs to mode=decoupled, got mode=gqa"):
        AttentionLayerConfig.model_validate({**base, "mode": "gqa"})
    teacher = attention_configs(spec().topology)[0]
    student = attention_configs(latent_spec(4, 2, exact_first_tokens=2, n_kv_heads=4).topology)[0]
    with pytest.raises(ConfigError, match="keeps the teacher's keys and values, of 2 heads, and the student has"):
        check_pair(teacher, student, SurgeryConfig())
