"""What averages a phase's gradients follows from the phase, and leaves the model as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.distill import LanguageModelObjective
from caramba.model import build_model
from caramba.runtime import GradientAverage
from caramba.train.callbacks import GradientAveraging
from tests.unit.model.model_specs import NORM, spec

IN_16_BITS = {"dtype": "bfloat16", "use_amp": False}


def averaging(parallel: dict[str, Any], phase: dict[str, Any]) -> tuple[GradientAveraging, GradientAverage, Any]:
    objective = LanguageModelObjective(build_model(spec(NORM)))
    module: Any = SimpleNamespace(objective=objective, model=objective.model)
    callback = GradientAveraging(
        ParallelConfig.model_validate({"strategy": "ddp", **parallel}),
        PhaseConfig.model_validate({"phase": "pretrain", "steps": 2, **phase}),
    )
    trainer: Any = None
    callback.on_train_start(trainer, module)
    return callback, module.averaging, module


@pytest.mark.parametrize(
    ("parallel", "phase", "expected"),
    [
        ({}, {}, ("refuse", None, True, True)),
        ({"find_unused_parameters": True}, {}, ("zeros", None, False, True)),
        ({"reduce_dtype": "bfloat16"}, {}, ("refuse", torch.bfloat16, True, True)),
        ({"reduce_dtype": "bfloat16"}, IN_16_BITS, ("refuse", None, True, True)),
        # One backward a block, and a schedule says which train.
        (
            {"reduce_dtype": "bfloat16", "find_unused_parameters": True},
            {"phase": "blockwise"},
            ("leave", None, False, False),
        ),
    ],
)
def test_a_phase_says_how_its_gradients_are_averaged(
    parallel: dict[str, Any], phase: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    callback, made, module = averaging(parallel, phase)
    assert (made.missing, made.exchange.narrow, made.rows is not None, bool(made._hooks)) == expected
    callback.restore()
    assert not any(one._post_accumulate_grad_hooks for one in module.model.parameters())
    assert "forward" not in module.model.embedder.token.__dict__


def test_a_group_holds_what_the_manifest_says() -> None:
    _, made, module = averaging({"bucket_cap_mb": 1}, {})
    assert len(made.groups) == 1, "less than a megabyte"
    assert sum(map(len, made.groups)) == len(list(module.model.parameters()))
    assert ParallelConfig(strategy="ddp", bucket_cap_mb=100).bytes_at_once(10**9) == 100 * 2**20
    by_itself = ParallelConfig(strategy="ddp")
    assert by_itself.bytes_at_once(12 * 400_000_000) == 400_000_000
    assert by_itself.bytes_at_once(4_000_000) == 25 * 2**20
