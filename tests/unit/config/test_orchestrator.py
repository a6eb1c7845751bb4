"""Strategies are data, keys of the orchestrator go together, and each mistake is named with its fix."""

from __future__ import annotations

from typing import Any

import pytest

from caramba.config.optimizer import STRATEGIES, halving_rungs, portfolio_bytes, trial_steps
from caramba.config.parallel import ParallelConfig
from caramba.config.parallel_check import conflicts
from caramba.config.train import PhaseConfig

BASE: dict[str, Any] = {"phase": "pretrain", "steps": 5000, "orchestrator_enabled": True}


def test_names_and_data_become_strategies() -> None:
    phase = PhaseConfig.model_validate(BASE | {"orchestrator_strategies": ["conservative_adamw", "lion"]})
    assert phase.orchestrator_strategies == {name: STRATEGIES[name] for name in ("conservative_adamw", "lion")}
    own = {"conservative_adamw": None, "mine": {"optimizer": "sgd", "rate": "matched", "momentum": 0.8}}
    phase = PhaseConfig(**BASE, orchestrator_strategies=own)
    assert phase.orchestrator_strategies["mine"].momentum == 0.8
    assert PhaseConfig.model_validate(phase.model_dump(mode="json")) == phase
    expected = {
        "conservative_adamw",
        "aggressive_adamw",
        "spike_resistant",
        "sgd_escape",
        "lion",
        "muon",
        "swats",
        "pidao",
        "pidao_adaptive",
    }
    assert set(STRATEGIES) == expected


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            {"orchestrator_strategies": ["lyon"]},
            "unknown strategy 'lyon'; did you mean 'lion'.; known: conserv",
        ),
        (
            {"orchestrator_initial_strategy": "lion"},
            "=lion is none of orchestrator_strategies, conservative_adamw",
        ),
        ({"orchestrator_safety_strategy": "safe"}, "orchestrator_safety_strategy=safe is none of"),
        ({"orchestrator_decision_interval": 5000}, "leaves no decision in steps=5000; use 1250 or less"),
        ({"orchestrator_budget": 0.001}, "one decision takes .*; raise the budget to 0.0"),
        ({"orchestrator_strategies": {"a": {"optimizer": "adamw"}}}, "rate"),
        (
            {
                "orchestrator_strategies": ["sgd_escape", "lion"],
                "orchestrator_initial_strategy": "sgd_escape",
            },
            "rate=matched and nothing before it to match; give the strategy a rate",
        ),
        (
            {"orchestrator_policy": "replay"},
            "give both orchestrator_policy=replay and orchestrator_decisions=FILE",
        ),
        (
            {"orchestrator_decisions": "a.jsonl"},
            "give both orchestrator_policy=replay and orchestrator_decisions",
        ),
        ({"optimizer": "lion", "lr": 1e-4}, "chooses optimiser and clipping by strategy, got optimizer=lion"),
        ({"phase": "blockwise"}, "belongs to phase=pretrain or global, got phase=blockwise"),
        (
            {"dtype": "bfloat16", "use_amp": False, "stochastic_rounding": True},
            "steps the weights themselves, got stochastic_rounding",
        ),
        (
            {"orchestrator_enabled": False, "orchestrator_budget": 0.5},
            "orchestrator_budget belongs to orchestrator_enabled=true; add that, or remove orchestrator_budget",
        ),
    ],
)
def test_mistakes_are_named_with_their_fix(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        PhaseConfig(**{**BASE, **keys})


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp2_tp", "pipeline"])
def test_spread_weights_are_refused_by_name(strategy: str) -> None:
    own = {"fsdp2_tp": {"tp": 2}, "pipeline": {"pp": 2}}.get(strategy, {})
    parallel = ParallelConfig.model_validate({"strategy": strategy, **own})
    found = list(conflicts(PhaseConfig(**BASE), parallel))
    assert any(f"parallel={strategy} splits them; use parallel=ddp or single" in one for one in found)
    assert not list(conflicts(PhaseConfig(**BASE), ParallelConfig(strategy="ddp")))


def test_a_decision_costs_its_rungs_and_its_test() -> None:
    assert halving_rungs(1, 20) == []
    assert halving_rungs(3, 20) == [(3, 10)]
    assert halving_rungs(8, 20) == [(8, 2), (4, 5), (2, 10)]
    keys = {"orchestrator_strategies": ["conservative_adamw", "lion", "muon"], "orchestrator_eval_horizon": 8}
    assert trial_steps(PhaseConfig(**BASE, **keys)) == 2 * 4 + 2 * 3 * 8
    assert trial_steps(PhaseConfig(**BASE, **keys, orchestrator_policy="ucb")) == 2 * 3 * 8


def test_states_are_counted_in_bytes() -> None:
    adamw = PhaseConfig.model_validate(BASE | {"orchestrator_strategies": ["conservative_adamw"]})
    assert portfolio_bytes(adamw, 10) == {"states": 80, "copies": 360}
    mixed = PhaseConfig.model_validate(BASE | {"orchestrator_strategies": ["conservative_adamw", "pidao"]})
    assert portfolio_bytes(mixed, 10)["states"] == 160
