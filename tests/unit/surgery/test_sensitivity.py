"""Widths and format under one budget of bytes, by measured KL: within it, better than one width, and predicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from caramba.config.kvcache import KVCacheKind, bytes_of_streams
from caramba.config.model import ModelConfig, ModelSpec, SurgeryConfig
from caramba.config.surgery import check_surgery
from caramba.config.topology import attention_configs
from caramba.errors import ConfigError
from caramba.infer.agreement import agreement
from caramba.surgery import CalibrationText, build_student, calibrate
from caramba.surgery.dba import search_beta, split_keys
from caramba.surgery.held_out import latent_output
from caramba.surgery.sensitivity import HeldOutKL
from tests.unit.surgery.models import calibrated, latent_spec, make_teacher, per_head_spec, spec, tokens

FORMATS = ("fp16", "q8_0", "mixed")


def stored_bytes(spec: ModelSpec) -> int:
    return sum(
        int(bytes_of_streams(config.dims().streams, config.cache_format or KVCacheKind.FP16))
        for config in attention_configs(spec.topology)
    )


@pytest.mark.parametrize("budget", [72, 100])
def test_a_budget_is_kept_and_its_kl_is_predicted(budget: int) -> None:
    teacher = make_teacher()
    with torch.no_grad():  # a second layer that attends almost evenly needs little
        teacher.get_parameter(f"{teacher.attention_layers()[1][0]}.projection.q.weight").mul_(0.01)
    calibration = calibrate(teacher, CalibrationText(tokens(24, 24, 1), tokens(100, 24, 2)))
    surgery = SurgeryConfig(kv_budget_bytes=budget, kv_budget_formats=FORMATS)
    student, report = build_student(teacher, latent_spec(8, 4), surgery, calibration, 1)
    assert 0.6 * budget < stored_bytes(student.spec) <= budget
    assert len({config.cache_format for config in attention_configs(student.spec.topology)}) == 1
    assert report.predicted_kl is not None
    measured = HeldOutKL(teacher, tokens(300, 24, 3)).of(student)
    assert measured == pytest.approx(report.predicted_kl, rel=0.1)
    cached = [layer.cached for layer in report.layers]
    assert cached[0] > cached[1]


def test_kl_of_a_model_equals_agreement_and_of_its_own_output_is_zero() -> None:
    teacher = make_teacher().float()
    calibration = calibrated(teacher)
    measure = HeldOutKL.on(teacher, calibration)
    student, _ = build_student(teacher, latent_spec(8, 4), SurgeryConfig(), calibration, 1)
    held = tokens(6, 24, 2)
    rows = [(row, row) for row in held]
    found = agreement(teacher, student, rows, windows=6, batch_size=6, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert measure.of(student) == pytest.approx(found.kl, rel=1e-3)
    _, layer = teacher.attention_layers()[0]
    assert measure.replacing(layer, calibration.of(layer)[1].output) == pytest.approx(0.0, abs=1e-5)
    assert not layer._forward_hooks


def test_rounded_maps_give_what_a_student_of_that_format_does() -> None:
    teacher = make_teacher()
    calibration = calibrated(teacher)
    student, _ = build_student(
        teacher,
        latent_spec(8, 4, cache_format="q4_0"),
        SurgeryConfig(cache_format=KVCacheKind.Q4_0),
        calibration,
        1,
    )
    _, layer = teacher.attention_layers()[0]
    statistics, held = calibration.of(layer)
    maps = search_beta(layer, statistics, split_keys(layer, statistics, 4), 8, held)
    ours = student.double().attention_layers()[0][1]
    seen: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    teacher(tokens(6, 24, 2))
    handle.remove()
    found = latent_output(held, maps, 0, KVCacheKind.Q4_0)
    torch.testing.assert_close(found, ours(seen[0]), rtol=1e-3, atol=1e-3)
    exact = latent_output(held, maps, 0)
    assert (found - exact).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("surgery", "student", "message"),
    [
        ({"kv_budget_formats": ["q8_0"]}, latent_spec(8, 4), "set kv_budget_bytes"),
        (
            {"kv_budget_formats": ["q8_0"], "kv_budget_bytes": 64},
            per_head_spec(4, 4, 4),
            "layout: latent alone",
        ),
        (
            {"kv_budget_formats": ["q8_0"], "kv_budget_bytes": 64, "cache_format": "q8_0"},
            latent_spec(8, 4, cache_format="q8_0"),
            "set cache_format: null",
        ),
    ],
)
def test_what_no_budget_can_choose_is_refused(surgery: dict[str, object], student: ModelSpec, message: str) -> None:
    model = {
        **student.model_dump(mode="json"),
        "teacher": {"manifest": spec().model_dump(mode="json")},
        "surgery": surgery,
    }
    with pytest.raises(ConfigError, match=message):
        check_surgery(ModelConfig.model_validate(model))


def test_a_second_budget_reads_the_choices_of_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = make_teacher()
    calibration = calibrate(teacher, CalibrationText(tokens(24, 24, 1), tokens(6, 24, 2)), cache=tmp_path)
    surgeries = [SurgeryConfig(kv_budget_bytes=n, kv_budget_formats=("fp16", "q8_0")) for n in (72, 100)]
    first, _ = build_student(teacher, latent_spec(8, 4), surgeries[0], calibration, 1)
    assert "layer 2 of 2 measured" in "".join(capsys.readouterr())
    second, _ = build_student(teacher, latent_spec(8, 4), surgeries[1], calibration, 1)
    printed = "".join(capsys.readouterr())
    assert "choices read from" in printed
    assert "measured," not in printed
    assert stored_bytes(first.spec) < stored_bytes(second.spec) <= 100
    (file,) = tmp_path.glob("*.json")
    file.unlink()
    again, _ = build_student(teacher, latent_spec(8, 4), surgeries[1], calibration, 1)
    assert again.spec == second.spec
