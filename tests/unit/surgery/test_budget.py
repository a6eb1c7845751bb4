"""Widths under a budget: the best allocation, never above the bytes, saved with the model, refused when impossible."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from caramba.config.model import ModelConfig, ModelSpec, SurgeryConfig
from caramba.config.surgery import check_surgery
from caramba.config.topology import attention_configs
from caramba.errors import ConfigError
from caramba.model import build_model, load_pretrained, save_model
from caramba.surgery import allocate, choose_windows, fit_widths, transplant
from caramba.surgery.budget import Choice, lower_hull
from tests.unit.surgery.models import calibrated, latent_spec, loud, make_teacher, per_head_spec, spec, tokens


def choices(*points: tuple[int, float]) -> list[Choice]:
    return [Choice(elements, damage, ()) for elements, damage in points]


def test_allocation_is_the_best_there_is_on_convex_curves() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(20):
        curves = []
        for _ in range(3):
            gains = torch.rand(4, generator=generator).sort(descending=True).values.tolist()
            damages = [5.0 - sum(gains[:count]) for count in range(5)]
            curves.append(choices(*((2 * index + 1, damage) for index, damage in enumerate(damages))))
        for budget in (3, 8, 13):
            found = allocate(curves, budget)
            best = min(
                sum(item.damage for item in combination)
                for combination in itertools.product(*curves)
                if sum(item.elements for item in combination) <= budget
            )
            assert sum(item.elements for item in found) <= budget
            assert sum(item.damage for item in found) == pytest.approx(best)


def test_hull_drops_what_is_dominated() -> None:
    hull = lower_hull(choices((1, 9.0), (2, 8.9), (3, 5.0), (4, 5.5), (6, 1.0), (9, 1.0)))
    assert [item.elements for item in hull] == [1, 3, 6]


@pytest.mark.parametrize("template", [latent_spec(8, 4), per_head_spec(4, 4, 4)], ids=["latent", "per_head"])
def test_layers_get_their_own_widths_within_the_budget(template: ModelSpec, tmp_path: Path) -> None:
    teacher = make_teacher()
    with torch.no_grad():  # a second layer that attends almost evenly needs little
        teacher.attention_layers()[1][1].projection.q.weight.mul_(0.01)
    calibration = calibrated(teacher)
    text = tokens(4, 24, 9)
    fitted = fit_widths(teacher, template, calibration, 64)
    cached = [config.dims().cached for config in attention_configs(fitted.topology)]
    assert 0.7 * 64 < 2 * sum(cached) <= 64
    assert cached[0] > cached[1]
    student = build_model(fitted, seed=1).double().eval()
    report = transplant(teacher, student, SurgeryConfig(method="dba"), calibration)
    assert [layer.cached for layer in report.layers] == cached
    student = student.float()
    save_model(student, tmp_path / "x.safetensors", role="student", phase="transplant", labels={})
    again, _ = load_pretrained(tmp_path / "x.safetensors")
    assert torch.equal(again(text), student(text))


@pytest.mark.parametrize(
    ("surgery", "message"),
    [
        ({"kv_budget_bytes": 11}, r"below one rotary pair .* the nearest possible is 12"),
        ({"kv_budget_bytes": 200}, r"more than the teacher's; the nearest possible is 128"),
        ({"kv_budget_bytes": 64, "method": "weight_svd"}, "measured error of method: dba, got weight_svd"),
        ({"sem_dim": 12}, r"model.surgery.sem_dim=12, and an attention layer of the student has sem_dim=8"),
        ({"layout": "per_head"}, "an attention layer of the student has layout=latent"),
        ({"method": "copy"}, "decoupled attention has parts that no pooled head fills"),
    ],
)
def test_impossible_surgery_names_the_nearest_possible(surgery: dict[str, object], message: str) -> None:
    model = {
        **latent_spec(8, 4).model_dump(mode="json"),
        "teacher": {"manifest": spec().model_dump(mode="json")},
    }
    with pytest.raises(ConfigError, match=message):
        check_surgery(ModelConfig.model_validate({**model, "surgery": surgery}))


def test_copy_pools_key_value_heads() -> None:
    teacher = loud(build_model(spec(), seed=3)).eval()
    same = build_model(spec(local_window=None, n_kv_heads=1), seed=9).eval()
    report = transplant(teacher, same, SurgeryConfig(method="copy"))
    source, target = teacher.attention_layers()[0][1], same.attention_layers()[0][1]
    pooled = source.projection.k.weight.view(2, 8, 32).mean(0)
    torch.testing.assert_close(target.projection.k.weight, pooled)
    assert [(layer.cached, layer.teacher_cached) for layer in report.layers] == [(16, 32)] * 2
    assert report.unmapped_teacher == ()
    with torch.no_grad():  # two equal heads pool to themselves: then the student is the teacher
        for _, layer in teacher.attention_layers():
            for weight in (layer.projection.k.weight, layer.projection.v.weight):
                weight[8:] = weight[:8]
    transplant(teacher, same, SurgeryConfig(method="copy"))
    torch.testing.assert_close(same(tokens(1, 9, 1)), teacher(tokens(1, 9, 1)), rtol=1e-4, atol=1e-4)


def test_calibration_and_held_out_windows_are_disjoint_and_spread() -> None:
    chosen, held = choose_windows(1000, 128, 32768)
    assert (len(chosen), len(held)) == (256, 256)
    assert not set(chosen) & set(held)
    assert max(chosen + held) > 900
    few, kept = choose_windows(5, 128, None)
    assert (len(few), len(kept)) == (4, 1)
    with pytest.raises(ConfigError, match="the train split has 1 window of 128 tokens"):
        choose_windows(1, 128, None)
