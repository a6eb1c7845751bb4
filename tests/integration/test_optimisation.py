"""Optimisers, clipping and precisions through the trainer: each goes on from a saved state bit for bit."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from caramba import kernels
from caramba.config.lower import lower_file
from caramba.config.manifest import Manifest, parse_manifest
from caramba.config.train import PhaseConfig
from caramba.data import TokenDataset
from caramba.distill import Backward, Batch, LanguageModelObjective
from caramba.errors import CarambaError
from caramba.model import build_model
from caramba.ops import backend
from caramba.runs.events import read_events
from caramba.runtime import Decision, load_plan, plan
from caramba.train import PhaseData, fit, state_path

D, STEPS, SAVED = 16, 8, 4
BLOCK = [
    {
        "type": "ResidualTopology",
        "layers": [
            {"type": "RMSNormLayer", "d_model": D},
            {"type": "AttentionLayer", "d_model": D, "n_heads": 2},
        ],
    },
    {
        "type": "ResidualTopology",
        "layers": [
            {"type": "RMSNormLayer", "d_model": D},
            {"type": "SwiGLULayer", "d_model": D, "d_ff": 32},
        ],
    },
    {"type": "RMSNormLayer", "d_model": D},
]
MODEL = {
    "embedder": {"vocab_size": 300, "d_model": D},
    "topology": {"type": "StackedTopology", "layers": BLOCK},
}
PHASE = {
    "phase": "pretrain",
    "steps": STEPS,
    "batch_size": 4,
    "block_size": 16,
    "lr": 0.01,
    "save_every": SAVED,
}
BFLOAT16 = {"dtype": "bfloat16", "use_amp": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "sgd, clipped by value": {"optimizer": "sgd", "gradient_clip_algorithm": "value", "gradient_clip": 0.1},
    "adafactor, wsd": {"optimizer": "adafactor", "scheduler": "wsd", "decay_ratio": 0.5},
    "muon, adagc": {
        "optimizer": "muon",
        "gradient_clip_algorithm": "adagc",
        "adagc": {"warmup_steps": 2},
        "accumulate": 2,
    },
    "float16, lion": {"dtype": "float16", "optimizer": "lion"},
    "float16, adamw": {"dtype": "float16", "ema_decay": 0.9},
    "bfloat16 weights": BFLOAT16,
    "bfloat16 weights, masters": {**BFLOAT16, "master_weights": True},
    "bfloat16 weights, masters in the moments": {**BFLOAT16, "master_weights": "in_moments"},
    "bfloat16 weights, rounded at random": {**BFLOAT16, "stochastic_rounding": True},
    "bfloat16 weights, muon, rounded at random": {
        **BFLOAT16,
        "stochastic_rounding": True,
        "optimizer": "muon",
    },
}


CUDA_ONLY = {"tf32": False, "optimizer_offload": False, "activation_offload": False}


class Breaking(LanguageModelObjective):
    """The loss of chosen steps is not finite."""

    broken: tuple[int, ...] = ()
    taken = 0

    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        is_broken, self.taken = self.taken in self.broken, self.taken + 1
        return super().step(batch, lambda loss: backward(loss * torch.nan if is_broken else loss))


class Interruption(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    run = {"id": "pretrain", "train": PHASE}
    data = {"type": "stdlib", "vocab_size": 300}
    tree = {"model": MODEL, "data": data, "runs": [run], "settings": {"instrument": "none"}}
    lowered = lower_file(tree, "mine", ())
    return parse_manifest(lowered.manifest, origins=lowered.origins, typed=tree)


def trained(
    manifest: Manifest,
    folder: Path,
    settings: dict[str, Any],
    stop: int | None = None,
    broken: tuple[int, ...] = (),
    device: str = "cpu",
    planned: dict[str, Decision] | None = None,
) -> dict[str, Tensor]:
    """Train in `folder` from its saved state, if it has one, and return the weights; `planned` was measured before."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    phase = PhaseConfig.model_validate(PHASE | settings)
    model = build_model(manifest.model, seed=1)
    tokens = torch.randint(0, 300, (2000,), generator=torch.Generator().manual_seed(2)).numpy()
    windows = TokenDataset(tokens, phase.block_size)
    objective = Breaking(model)
    objective.broken = broken
    decided = plan(phase, device=device, kernels="auto", ops={}, name="pretrain")
    decided = dataclasses.replace(decided, decisions=decided.decisions | (planned or {}))
    fit(
        objective,
        phase,
        PhaseData(windows, windows, seed=3, start=0),
        decided,
        manifest=manifest,
        run_dir=folder,
        save_final=lambda: None,
        callbacks=[] if stop is None else [Interruption(stop)],
    )
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_stopped_phase_goes_on_bit_equal(settings: dict[str, Any], manifest: Manifest, tmp_path: Path) -> None:
    whole = trained(manifest, tmp_path / "whole", settings)
    with pytest.raises(KeyboardInterrupt):
        trained(manifest, tmp_path / "stopped", settings, stop=SAVED + 1)
    assert state_path(tmp_path / "stopped", "pretrain").is_file()
    resumed = trained(manifest, tmp_path / "stopped", settings)
    start = dict(build_model(manifest.model, seed=1).named_parameters())
    for name, value in whole.items():
        assert value.dtype == torch.float32
        assert torch.isfinite(value).all(), name
        assert torch.equal(value, resumed[name]), name
        assert not torch.equal(value, start[name]), name


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_step_that_is_not_finite_is_left_out_or_stops_the_phase(
    precision: str, manifest: Manifest, tmp_path: Path
) -> None:
    settings = {"dtype": precision, "scheduler": "none", "gradient_clip_algorithm": "adagc"}
    skip = {**settings, "nonfinite": "skip"}
    # Of a phase that ends after the broken step, and of one that ends before it.
    left_out = trained(manifest, tmp_path / "skip", {**skip, "steps": 4}, broken=(3,))
    before = trained(manifest, tmp_path / "before", {**skip, "steps": 3})
    if precision == "float32":
        assert all(torch.equal(left_out[name], before[name]) for name in before)
        (event,) = [item for item in read_events(tmp_path / "skip") if item["event"] == "step_skipped"]
        assert (event["step"], len(event["windows"])) == (4, 4)
        with pytest.raises(CarambaError, match=r"pretrain: the loss is 5.* norm nan at step 6; .* nonfinite=skip"):
            trained(manifest, tmp_path / "stop", settings, broken=(5,))
        assert len(json.loads((tmp_path / "stop" / "nonfinite.json").read_text())["windows"]) == 4
        assert torch.load(state_path(tmp_path / "stop", "pretrain"))["global_step"] == SAVED
    else:  # the loss itself is finite: the scale is taken to be too large, and is halved
        assert all(torch.equal(left_out[name], before[name]) for name in before)
        assert not [item for item in read_events(tmp_path / "skip") if item["event"] == "step_skipped"]


def test_first_steps_that_depart_from_the_plan_are_warned_of(
    manifest: Manifest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = {"steps": 24, "batch_size": 1}
    for seconds in (1e-6, None):
        folder = tmp_path / str(seconds)
        if seconds is None:  # what the steps of the other run took, which these take again within a wide margin
            (event,) = [item for item in read_events(tmp_path / "1e-06") if item["event"] == "speed"]
            assert event["planned_step_seconds"] == 1e-6
            assert event["tokens_per_s"] == pytest.approx(PHASE["block_size"] / event["step_seconds"])
        planned = {} if seconds is None else {"step_seconds": Decision(seconds, "measured")}
        trained(manifest, folder, long, planned=planned)
        said = capsys.readouterr().err
        found = re.search(r"pretrain: a step takes .* s, \+\d+% of the 1e-06 s that were planned; plan=refresh", said)
        assert (found is None) == (seconds is None), said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    "settings",
    [*SETTINGS.values(), {"tf32": True}, {"optimizer_offload": True, "activation_offload": True}],
    ids=str,
)
def test_a_gpu_trains_with_each(settings: dict[str, Any], manifest: Manifest, tmp_path: Path) -> None:
    settings = {"dtype": "float32", **settings}
    here = trained(manifest, tmp_path / "cuda", settings, device="cuda")
    there = trained(manifest, tmp_path / "cpu", {**settings, **CUDA_ONLY})
    start = dict(build_model(manifest.model, seed=1).named_parameters())
    for name, value in here.items():
        assert torch.isfinite(value).all(), name
        moved = (there[name] - start[name].detach()).norm()
        if not {"16", "muon"} & set(re.findall("16|muon", str(settings))):  # their roundings differ by device
            assert (value - there[name]).norm() < 0.05 * moved, name
        else:
            assert 0.2 * moved < (value - start[name].detach()).norm() < 5 * moved, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_stops_a_step_late_and_saves_nothing_of_it(manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(CarambaError, match=r"norm nan at step 4; .* nonfinite=skip"):
        trained(manifest, tmp_path / "stop", {"dtype": "float32"}, broken=(SAVED - 1,), device="cuda")
    assert not state_path(tmp_path / "stop", "pretrain").exists(), "the save after step 4 waits for its reading"
    assert len(json.loads((tmp_path / "stop" / "nonfinite.json").read_text())["windows"]) == 4


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no float8 here"
)
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "rowwise_with_gw_hp"])
def test_a_gpu_trains_in_float8(recipe: str, manifest: Manifest, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    kernels.load("cuda")
    settings = {"dtype": "bfloat16", "float8": recipe, "float8_min_width": 16, "compile_model": True}
    weights = trained(manifest, tmp_path / "float8", settings, device="cuda")
    plain = trained(manifest, tmp_path / "plain", {"dtype": "bfloat16"}, device="cuda")
    assert weights.keys() == plain.keys()
    (event,) = [item for item in read_events(tmp_path / "float8") if item["event"] == "float8"]
    assert (len(event["layers"]), event["casts"]) == (
        7,
        "torchao" if recipe.endswith("hp") else "kernels, SwiGLU's too",
    )
    assert any(not torch.equal(weights[name], plain[name]) for name in plain)
    assert all(torch.isfinite(value).all() for value in weights.values())


def test_products_in_float8_go_on_bit_equal_and_near_bfloat16(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = ("float32", "bfloat16", "float16", "float8")
    monkeypatch.setattr("caramba.runtime.device.device_precisions", lambda device: everything)
    for op in ("float8_cast", "float8_swiglu", "float8_swiglu_backward"):
        monkeypatch.setitem(backend._attached, (op, "cpu"), "triton")  # what casts is the reference
    settings = {**BFLOAT16, "float8": "rowwise", "float8_min_width": 16}
    whole = trained(manifest, tmp_path / "whole", settings)
    with pytest.raises(KeyboardInterrupt):
        trained(manifest, tmp_path / "stopped", settings, stop=SAVED + 1)
    resumed = trained(manifest, tmp_path / "stopped", settings)
    (event,) = [item for item in read_events(tmp_path / "whole") if item["event"] == "float8"]
    assert (len(event["layers"]), event["casts"], event["left"]) == (7, "kernels, SwiGLU's too", {})
    plain = trained(manifest, tmp_path / "plain", BFLOAT16)
    lowered = [load_plan(tmp_path / name / "plan.json")["pretrain"].value("lowered") for name in ("whole", "plain")]
    assert lowered == [{"float8_swiglu": 1}, {}]
    assert all(torch.equal(value, resumed[name]) for name, value in whole.items())
    start = dict(build_model(manifest.model, seed=1).named_parameters())
    moved = sum((plain[name] - start[name].detach()).square().sum() for name in plain)
    apart = sum((plain[name] - whole[name]).square().sum() for name in plain)
    assert 0 < apart < 0.2 * moved
