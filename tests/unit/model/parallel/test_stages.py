"""A model cut into stages: its layers are on one stage each, and the stages in turn are the model."""

from __future__ import annotations

import pytest
import torch
from tests.unit.model.model_specs import NORM, block, spec

from caramba.config.model import ModelSpec
from caramba.errors import ConfigError
from caramba.model import build_model
from caramba.model.parallel import split_stage
from caramba.model.parallel.stages import TIED


def stacked(repeat: int, *, tied: bool) -> ModelSpec:
    nested = {"type": "NestedTopology", "layers": block("latent")["layers"], "repeat": repeat}
    return spec(nested, max_positions=8, tied=tied)


@pytest.mark.parametrize("tied", [False, True])
def test_stages_in_turn_are_the_model(tied: bool) -> None:
    described = stacked(6, tied=tied)
    whole = build_model(described, seed=3).double()
    tokens = torch.arange(12).view(2, 6) % described.embedder.vocab_size
    features, names = tokens, []
    for index in range(3):
        stage = split_stage(build_model(described, seed=3).double(), index, 3)
        features = stage(features)
        names += list(stage.model.state_dict())
    copied = [TIED] if tied else []
    assert sorted(names) == sorted([*whole.state_dict(), *copied])
    torch.testing.assert_close(stage.model.logits(features), whole(tokens), rtol=0, atol=1e-12)
    assert {name for name in names if name.startswith(("topology.layers.1", "head"))} <= set(stage.model.state_dict())


def test_what_is_no_uniform_stack_is_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"pp=4 does not divide the 6 of the stack; use a pp that does"):
        split_stage(build_model(stacked(6, tied=True), device="meta"), 0, 4)
    with pytest.raises(ConfigError, match=r"this topology has no such list or several; use parallel=fsdp2"):
        split_stage(build_model(spec(NORM), device="meta"), 0, 2)
