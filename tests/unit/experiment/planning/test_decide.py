"""Decisions from trials: each follows from the figures that stand beside it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from caramba.config.train import PhaseConfig
from caramba.errors import OutOfMemory
from caramba.experiment.planning import Budget, PlanningContext, StepCandidate, Trial, decide

KEPT = {"none": 10, "selective": 5, "full": 1}
SPEED = {False: 1.0, "default": 0.6, "reduce-overhead": 0.5, "max-autotune": 0.45}
START = {False: 0.0, "default": 20.0, "reduce-overhead": 30.0, "max-autotune": 300.0}


def measure(candidate: StepCandidate) -> Trial:
    """A model of 100 bytes, and per sequence what checkpointing keeps; recomputation and compilation take their time."""
    speed = SPEED[candidate.compile_model] * (0.5 if candidate.dtype == "bfloat16" else 1.0)
    second = (
        0.1
        * candidate.batch_size
        * speed
        * {"none": 1.0, "selective": 1.1, "full": 1.33}[candidate.activation_checkpointing]
    )
    first = (second + START[candidate.compile_model],)
    seconds = first + (second,) * (candidate.warm_up + candidate.timed - 1)
    peak = 100 + KEPT[candidate.activation_checkpointing] * candidate.batch_size
    if peak > 200:
        return Trial(candidate, refusal="out of memory", is_out_of_memory=True)
    return Trial(candidate, seconds, peak, 5.01 if candidate.dtype == "bfloat16" else 5.0)


def decided(ground: PlanningContext | None = None, **settings: Any) -> dict[str, Any]:
    phase = PhaseConfig.model_validate({"phase": "pretrain", "steps": 1000, "batch_size": 4, **settings})
    found = decide(phase, ground or PlanningContext(200, 10**6, "float32"), measure, Budget(10**6))
    return {key: item.value for key, item in found.items()}


def test_the_least_checkpointing_that_fits_the_batch() -> None:
    for size, way in ((4, "none"), (8, "none"), (9, "selective"), (16, "selective"), (60, "full")):
        assert decided(activation_checkpointing="auto", batch_size=size)["activation_checkpointing"] == way
    both = decided(activation_checkpointing="auto", batch_size="auto")
    assert (both["activation_checkpointing"], both["batch_size"]) == ("none", 8)
    full = decided(activation_checkpointing="full", batch_size="auto")
    assert full["batch_size"] == 80


def test_a_threshold_decides_whether_to_checkpoint_at_all() -> None:
    settings = {"activation_checkpointing": "full", "batch_size": 4}
    assert decided(activation_checkpoint_threshold=0.8, **settings)["activation_checkpointing"] == "none"
    assert decided(activation_checkpoint_threshold=0.6, **settings)["activation_checkpointing"] == "full"


def test_compilation_is_held_against_what_the_run_saves() -> None:
    ground = PlanningContext(200, 1, "float32", compile_modes=("default", "reduce-overhead", "max-autotune"))
    for steps, mode in ((50, False), (150, "default"), (1000, "reduce-overhead"), (100_000, "max-autotune")):
        assert decided(ground, compile_model="auto", steps=steps)["compile_model"] == mode


def test_a_mode_that_compiles_longer_than_is_left_is_skipped_by_name() -> None:
    phase = PhaseConfig.model_validate({"phase": "pretrain", "steps": 1000, "batch_size": 4, "compile_model": "auto"})
    ground = PlanningContext(200, 1, "float32", compile_modes=("default", "reduce-overhead", "max-autotune"))
    found = decide(phase, ground, measure, Budget(33, clock=lambda: 0.0))
    assert found["compile_model"].value == "reduce-overhead"
    assert "compiled (max-autotune): about 34 s, 33 s of 33 s left for it" in found["planning"].reason


def test_bfloat16_has_to_be_faster_and_near() -> None:
    ground = PlanningContext(200, 1, "bfloat16", compares_dtypes=True)
    phase = PhaseConfig.model_validate({"phase": "pretrain", "steps": 9, "batch_size": 4})
    found = decide(phase, ground, measure, Budget())
    assert found["precision"].value == "bf16-mixed"
    assert (
        "bfloat16 takes 0.50 of float32's time at batch 4; its loss is 0.20% off after 5 steps" in found["dtype"].reason
    )
    figures = {"batch_size": 4.0, "float32_seconds": 0.4, "bfloat16_seconds": 0.2, "loss_drift": 0.002}
    assert found["dtype"].measured == pytest.approx(figures)


@pytest.mark.parametrize(("wins", "utilization", "held_at"), [(1.0, 1.0, 2), (4.0, 1.0, 2), (4.0, 0.76, 1)])
def test_precision_is_held_at_the_batch_that_both_can_take(wins: float, utilization: float, held_at: int) -> None:
    """Float32 has room for a third of the batch; where it leads it gets a batch of its own."""
    trials: list[StepCandidate] = []

    def both(candidate: StepCandidate) -> Trial:
        trials.append(candidate)
        is_narrow = candidate.dtype == "bfloat16"
        made = measure(replace(candidate, batch_size=candidate.batch_size * (1 if is_narrow else 3), dtype=""))
        seconds = tuple(second * (wins if is_narrow else 1.0) for second in made.seconds)
        return replace(made, candidate=candidate, seconds=seconds)

    phase = PhaseConfig.model_validate(
        {"phase": "pretrain", "steps": 9, "batch_size": "auto", "memory_utilization": utilization}
    )
    found = decide(phase, PlanningContext(200, 10**6, "bfloat16", compares_dtypes=True), both, Budget(10**6))
    assert found["dtype"].measured is not None
    assert found["dtype"].measured["batch_size"] == held_at
    assert max(trial.batch_size for trial in trials) > held_at
    narrow, wide = {1.0: (10, 3), 0.76: (5, 1)}[utilization]
    assert (found["dtype"].value, found["batch_size"].value) == (
        ("bfloat16", narrow) if wins == 1.0 else ("float32", wide)
    )


def test_float32_that_fits_what_is_free_and_not_the_share_of_it_leaves_bfloat16() -> None:
    """One float32 sequence peaks between the two; it is faster, and no batch of it would be taken."""

    def narrow_is_slow(candidate: StepCandidate) -> Trial:
        is_narrow = candidate.dtype == "bfloat16"
        made = measure(replace(candidate, dtype=""))
        seconds = tuple(second * (4.0 if is_narrow else 1.0) for second in made.seconds)
        peak = made.peak_bytes + (0 if is_narrow else 70)
        return replace(made, candidate=candidate, seconds=seconds, peak_bytes=peak)

    ground = PlanningContext(200, 10**6, "bfloat16", compares_dtypes=True)
    words = {"phase": "pretrain", "steps": 9, "memory_utilization": 0.85}
    open_size = PhaseConfig.model_validate({**words, "batch_size": "auto"})
    found = decide(open_size, ground, narrow_is_slow, Budget(10**6))
    assert (found["dtype"].value, found["precision"].value) == ("bfloat16", "bf16-mixed")
    assert found["dtype"].reason == "auto: batch 1, float32: takes 0.00 GB, over memory_utilization"
    assert found["batch_size"].value == 7
    asked = decide(PhaseConfig.model_validate({**words, "batch_size": 1}), ground, narrow_is_slow, Budget())
    assert asked["dtype"].value == "float32", "a batch that is asked for has all that is free"


def test_several_ranks_say_what_their_peaks_are_made_of() -> None:
    ground = PlanningContext(150, 9, "float32", ranks=2, rank_bytes=-60 * 10**9)
    phase = PhaseConfig.model_validate({"phase": "pretrain", "steps": 9, "batch_size": "auto"})
    found = decide(phase, PlanningContext(200, 9, "float32", ranks=2, rank_bytes=10**9), measure, Budget())
    assert "free, a peak being one process's plus 1.00 GB that 2 ranks add" in found["batch_size"].reason
    with pytest.raises(OutOfMemory, match=r"which 2 ranks would share: .* give batch_size by hand"):
        decide(phase, replace(ground, room_bytes=100), measure, Budget())


def test_what_fits_in_no_way_is_refused_with_the_ways_out() -> None:
    with pytest.raises(
        OutOfMemory,
        match=r"batch 99, float32, selective checkpointing at block_size=256 does not run .*smaller batch_size",
    ):
        decided(batch_size=99, activation_checkpoint_threshold=0.5, activation_checkpointing="selective")
    with pytest.raises(OutOfMemory, match=r"one sequence takes 0\.00 GB, over memory_utilization"):
        decided(PlanningContext(105, 9, "float32"), batch_size="auto")
