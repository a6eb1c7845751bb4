"""Decisions of a phase's plan: precision and learning rate, each with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.launch.config_files import conf_root
from caramba.launch.freeze import freeze
from caramba.runtime import RuntimePlan, apply_threads, check_gpu, plan, read_valid_plans, save_plan


def planned(d_model: int = 128, **settings: object) -> RuntimePlan:
    phase = PhaseConfig.model_validate({"phase": "blockwise", "steps": 5, **settings})
    return plan(phase, device="cpu", kernels="auto", ops={"quantize": "reference"}, name="x", d_model=d_model)


@pytest.mark.parametrize(
    ("settings", "dtype", "reason"),
    [
        ({}, "float32", "auto: float32 on cpu"),
        ({"dtype": "bfloat16"}, "bfloat16", "the manifest: dtype=bfloat16"),
        ({"use_amp": True, "amp_dtype": "bfloat16"}, "bfloat16", "the manifest: use_amp=true"),
        ({"use_amp": True, "dtype": "float32"}, "bfloat16", "the manifest: use_amp=true"),
        ({"use_amp": False}, "float32", "the manifest: use_amp=false"),
        ({"dtype": "float32"}, "float32", "the manifest: dtype=float32"),
        ({"dtype": "float16"}, "float16", "the manifest: dtype=float16"),
        ({"use_amp": True, "amp_dtype": "float16"}, "float16", "the manifest: use_amp=true, float16"),
    ],
)
def test_precision(settings: dict[str, object], dtype: str, reason: str) -> None:
    made = planned(**settings)
    assert made.value("dtype") == dtype
    assert (
        made.value("precision")
        == {
            "float32": "32-true",
            "bfloat16": "bf16-mixed",
            "float16": "16-mixed",
        }[dtype]
    )
    assert made.value("weights") == "float32"
    assert made.decisions["dtype"].reason.startswith(reason)


def test_bfloat16_without_autocast_is_that_of_the_weights() -> None:
    made = planned(phase="pretrain", dtype="bfloat16", use_amp=False, stochastic_rounding=True)
    assert [made.value(key) for key in ("dtype", "weights", "precision")] == [
        "bfloat16",
        "bfloat16",
        "bf16-true",
    ]


def test_what_a_device_lacks_is_refused_with_what_it_has() -> None:
    text = r"train.tf32=true: the device cpu supports float32, bfloat16, float16; remove tf32"
    with pytest.raises(ConfigError, match=text):
        planned(tf32=True)
    with pytest.raises(ConfigError, match=r"train.optimizer_offload: on the device cpu all is in the host's memory"):
        planned(optimizer_offload=True)
    with pytest.raises(
        ConfigError,
        match=r"train.float8=rowwise: the device cpu supports float32, bfloat16, float16; remove float8",
    ):
        planned(float8="rowwise")


def test_a_profile_of_one_gpu_is_refused_on_another_device() -> None:
    manifest = freeze(["device=cuda_h200", "model=tiny", "train=pretrain"]).manifest
    phase = manifest.groups[0].runs[0].train
    assert phase is not None
    assert (manifest.device, manifest.settings.gpu) == ("cuda", "H200")
    assert phase.measured_keys == ("compile_model", "num_workers", "activation_checkpointing")
    own = freeze(["device=cuda_h200", "model=tiny", "train=pretrain", "train.compile=false"]).manifest.groups[0]
    assert own.runs[0].train is not None
    assert own.runs[0].train.compile_model is False
    check_gpu(torch.device("cpu"), None)
    with pytest.raises(ConfigError, match=r"settings.gpu=H200: .* this is the device cpu; use device=auto"):
        check_gpu(torch.device("cpu"), "H200")


@pytest.mark.parametrize(
    ("wanted", "name", "is_that"),
    [
        ("H200", "NVIDIA H200", True),
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("A100", "NVIDIA A100-SXM4-40GB", True),
        ("H200", "NVIDIA GH200 480GB", False),
        ("A10", "NVIDIA A100-SXM4-40GB", False),
    ],
)
def test_a_gpu_is_known_by_a_whole_word_of_its_name(
    wanted: str, name: str, is_that: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    if is_that:
        check_gpu(torch.device("cuda"), wanted)
    else:
        with pytest.raises(ConfigError, match=f"settings.gpu={wanted}: .* this is {name}; use device=auto"):
            check_gpu(torch.device("cuda"), wanted)


@pytest.mark.parametrize(
    ("gpu", "strategies"), [("a100", ["fsdp2"]), ("h100", ["fsdp2"]), ("h200", ["fsdp2_tp", "pipeline"])]
)
def test_a_profile_of_a_gpu_composes_with_sharded_weights_and_by_its_values_with_stages(
    gpu: str, strategies: list[str]
) -> None:
    values = ["train.compile_model=false", "train.num_workers=2", "train.activation_checkpointing=none"]
    assert f"parallel=pipeline needs values, {' '.join(values)}" in (
        (conf_root() / "device" / f"cuda_{gpu}.yaml").read_text()
    )
    for strategy in strategies:
        words = [f"device=cuda_{gpu}", "model=tiny", "train=pretrain", f"parallel={strategy}"]
        phase = freeze([*words, *(values if strategy == "pipeline" else [])]).manifest.groups[0].runs[0].train
        assert phase is not None
        assert phase.activation_checkpoint_granularity == "layer"


def test_a_damaged_plan_of_a_run_is_set_aside_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, made = tmp_path / "plan.json", planned()
    assert read_valid_plans(path) == {}
    save_plan(path, made)
    assert read_valid_plans(path) == {"x": made}
    whole = json.loads(path.read_text())
    damages = {"": b'{"x": {"sign', ".2": b"\xff\xfe", ".3": b"[]"}
    reasons = {
        ".4": ("phase x has no threads", {}),
        ".5": ("threads='many', which is no count", {"threads": {"value": "many", "reason": ""}}),
        ".6": ("threads=0, which is no count", {"threads": {"value": 0, "reason": ""}}),
    }
    for ending, (_, threads) in reasons.items():
        kept = {key: value for key, value in whole["x"]["decisions"].items() if key != "threads"}
        damages[ending] = json.dumps({"x": whole["x"] | {"decisions": kept | threads}}).encode()
    before = torch.get_num_threads()
    for ending, damage in damages.items():
        path.write_bytes(damage)
        apply_threads(path)
        assert not path.exists()
        said = " ".join(capsys.readouterr().err.split())
        assert f"it is plan.damaged{ending}.json now, and every phase is planned again" in said
        assert "without the thread count that was frozen in the plan, so that its sums on a CPU may" in said
        assert reasons.get(ending, ("not a runtime plan",))[0] in said
        assert "delete it" not in said
    assert torch.get_num_threads() == before
    for ending, damage in damages.items():
        assert (tmp_path / f"plan.damaged{ending}.json").read_bytes() == damage, "an earlier one is kept"


def test_an_automatic_learning_rate_falls_with_the_width() -> None:
    assert planned(2048, lr="auto").value("lr") == 2e-4
    made = planned(128, lr="auto")
    assert made.value("lr") == pytest.approx(3.2e-3)
    assert made.decisions["lr"].reason == "auto: 0.0002 times (2048/128)^1"
    assert planned(128, lr=1e-3).decisions["lr"].reason == "the manifest"
    assert planned(2048, phase="global", objective="kl", lr="auto").value("lr") == 8e-5
    assert planned(128, phase="global", objective="kl", lr="auto").value("lr") == pytest.approx(3.2e-4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"dtype": "bfloat16", "use_amp": False}, "this phase does not train all of them"),
        ({"dtype": "float16", "use_amp": False}, "would hold weights in float16, which loses updates"),
        (
            {"use_amp": False, "amp_dtype": "float16"},
            "needs autocast, which use_amp=false forbids; remove one",
        ),
        ({"dtype": "bfloat16", "amp_dtype": "float16"}, "dtype=bfloat16 and amp_dtype=float16 are two"),
        (
            {"master_weights": True},
            "master_weights belongs to weights in bfloat16, got dtype=auto, use_amp=auto",
        ),
        (
            {
                **{"phase": "pretrain", "dtype": "bfloat16", "use_amp": False},
                **{"master_weights": True, "stochastic_rounding": True},
            },
            "keeps what stochastic_rounding would spread",
        ),
        (
            {
                **{"phase": "pretrain", "dtype": "bfloat16", "use_amp": False},
                **{"master_weights": "in_moments", "optimizer": "lion", "lr": 1e-4},
            },
            "master_weights=in_moments is of the moments of fused AdamW, got optimizer=lion",
        ),
        (
            {
                **{"phase": "pretrain", "dtype": "bfloat16", "use_amp": False},
                **{"master_weights": "in_moments", "fused_optimizer": False},
            },
            "got optimizer=adamw, fused_optimizer=false; use master_weights=true",
        ),
        (
            {
                **{"phase": "pretrain", "dtype": "bfloat16", "use_amp": False},
                **{"master_weights": "in_moments", "optimizer_offload": True},
            },
            "needs no float32 weights, which optimizer_offload keeps on the host",
        ),
        ({"lora": {"rank": 4}}, "lora belongs to phase=global, got phase=blockwise"),
        (
            {"phase": "global", "attention_kl": 0.1},
            "attention_kl belongs to phase=blockwise or drift, got phase=global",
        ),
        ({"phase": "global", "trainable": "maps"}, "trainable belongs to phase=blockwise or drift"),
        ({"phase": "global", "schedule": "sequential"}, "schedule belongs to phase=blockwise or drift"),
        ({"phase": "global", "cache_teacher_outputs": True}, "objective=ce reads no teacher outputs"),
        ({"phase": "global", "objective": "kl", "kl_weight": 0.2}, "kl_weight belongs to objective=mixed"),
        ({"objective": "mixed"}, "phase=blockwise has a loss of its own, got objective=mixed"),
        (
            {"phase": "global", "objective": "ce", "temperature": 2.0},
            "temperature belongs to objective=kl or mixed",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        planned(**settings)
