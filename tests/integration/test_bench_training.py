"""The training bench: recipes of float8 take turns, verdicts are of equal optimisers, and peaks are of one side."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from caramba.launch.freeze import freeze
from caramba.ops import backend
from caramba.train.throughput import PeakMemory

ROOT = Path(__file__).parents[2]


def test_recipes_of_float8_take_turns_and_the_trainers_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchao")
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    bench, report = (importlib.import_module(name) for name in ("cases.training", "report"))
    monkeypatch.setitem(backend._attached, ("float8_cast", "cpu"), "triton")
    spec = freeze(["model=tiny", "train=pretrain", "settings.instrument=none"]).manifest.model
    x = torch.randint(spec.embedder.vocab_size, (1, 17), generator=torch.Generator().manual_seed(0))
    given = {"has_masters": False, "clip": None, "least_width": 16}
    batch = (spec, x[:, :-1], x[:, 1:], False)
    made = {"bf16": bench.ours_bare(*batch, **given)}
    for name, recipe in bench.recipes_of(["rowwise", "rowwise/torchao"], torch.device("cpu")):
        made[name] = bench.ours_bare(*batch, float8=recipe, **given)
    assert list(made) == ["bf16", "float8 rowwise, cast by kernels", "float8 rowwise, cast by torchao"]
    for side in made.values():
        side.step()
        side.step()
    ran = bench.Turns(made, torch.device("cpu"), steps=1, turns=1, deadline=0.0, tokens=16)
    for seconds, name in zip((3.0, 2.9, 2.0, 4.0), ran.seconds, strict=True):
        ran.seconds[name] = [seconds]
    found = bench.float8_of(ran, made, "bf16", "rowwise")
    ours, theirs = list(found["over_bf16"].items())[1:]
    assert (ours[1], theirs[1]) == (2.9 / 2.0, 2.9 / 4.0)
    through_trainer = "caramba with float8=rowwise"
    assert found["musts"] == [{"over": "bf16", "limit": 1.15, "got": 2.9 / 3.0, "by": through_trainer}]
    assert found["losses"][ours[0]] == found["losses"][theirs[0]], "the same numbers"
    assert 0 < abs(found["loss_change"][ours[0]]) < 0.01
    part = {"part": "fp8", "batch": 1, "tokens": 16, "clip": None, "steps_a_turn": 1, "ratios": {}, **found}
    rows = bench.rows_of(ran, 1.0, None)
    page = report.section("training", {"model": "tiny", "parts": {"fp8": part | {"rows": rows}}})
    assert "float8 rowwise, cast by kernels **1.450x**" in page
    assert "0.967 over bf16, by caramba with float8=rowwise (must 1.15): **missed**" in page


def test_a_ratio_of_two_optimisers_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    verdicts = importlib.import_module("verdicts").training_verdicts
    musts = [{"over": name, "limit": 0.98, "got": 1.004} for name in ("bare loop", "our model bare")]
    both = "1.004 over bare loop (must 0.98): met; 1.004 over our model bare (must 0.98): "
    assert verdicts({"musts": musts}) == ["", f"{both}not comparable."]
    assert verdicts({"musts": musts, "bare_optimizer": "ours"}) == ["", f"{both}met."]


class FakeAllocator:
    """The counters of CUDA's allocator, of steps that hold `between` bytes before and after, and `within` more."""

    def __init__(self, between: int, within: int) -> None:
        self.between, self.within, self.peak = between, within, 0

    def step(self) -> None:
        self.peak = max(self.peak, self.between + self.within)

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        read = {"max_memory_allocated": lambda: self.peak, "max_memory_reserved": lambda: self.peak}
        for name, value in {**read, "memory_allocated": lambda: self.between}.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value: value())
        patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *_: setattr(self, "peak", self.between))
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)


def test_the_phases_own_peak_holds_what_a_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "bench"))
    turns_of = importlib.import_module("cases.training").Turns
    memory, device = FakeAllocator(between=7, within=14), torch.device("cuda")
    memory.patch(monkeypatch)
    peak = PeakMemory(device)
    peak.reset()
    trainer = SimpleNamespace(should_stop=False, lightning_module=torch.nn.Module())
    turns = turns_of({}, device, steps=2, turns=1, deadline=0.0)
    for _ in range(5 + 2):
        assert not trainer.should_stop
        memory.step()
        turns.on_train_batch_end(trainer, None, None, None, 0)
    assert trainer.should_stop
    assert turns.peaks == {"caramba": 21}
    assert peak.read() == {"peak_allocated_bytes": 21.0, "peak_reserved_bytes": 21.0}
