"""What several ranks do before a phase trains: refuse what they cannot share, and make room for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.model.model_specs import NORM, block, spec

from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.experiment import ranks
from caramba.model import Model, build_model
from caramba.model.parallel import Stage


def session_of(model: Any, **parallel: object) -> Any:
    manifest = SimpleNamespace(model=model, parallel=ParallelConfig.model_validate(parallel))
    return SimpleNamespace(manifest=manifest, teacher=None, student=None, device=torch.device("cpu"))


def test_dropout_under_sequence_parallel_is_refused_before_training() -> None:
    dropped = spec(NORM, {"type": "DropoutLayer", "p": 0.2})
    split = {"strategy": "fsdp2_tp", "tp": 2}
    ranks.check_split(session_of(dropped, **split))
    with pytest.raises(ConfigError, match=r"a DropoutLayer with p=0\.2 .*use p=0, or sequence_parallel=false"):
        ranks.check_split(session_of(dropped, **split, sequence_parallel=True))


def test_a_model_leaves_the_device_before_a_stage_takes_memory_there(monkeypatch: pytest.MonkeyPatch) -> None:
    described = spec({"type": "NestedTopology", "layers": block("latent")["layers"], "repeat": 2})
    model, done = build_model(described), []
    move = model.to

    def moved(device: Any) -> Model:
        done.append(f"to {device}")
        return move(device)

    def sent(whole: Model | None, stage: Stage, device: torch.device) -> None:
        assert whole is model
        done.append("send")

    monkeypatch.setattr(model, "to", moved)
    monkeypatch.setattr(ranks, "send_stages", sent)
    phase = PhaseConfig(phase="pretrain", steps=1, batch_size=2, block_size=8)
    ranks._staged(session_of(described, strategy="pipeline", pp=2), phase, model, described)
    assert done == ["to cpu", "send"]
