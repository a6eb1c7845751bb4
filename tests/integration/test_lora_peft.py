"""Low-rank updates beside those of peft: the same names, and the same function of the same weights."""

from __future__ import annotations

import pytest
import torch

from caramba.distill import Lora
from caramba.model import build_model
from tests.unit.surgery.test_weight_svd import TOKENS, spec


def test_names_scale_and_dropout_place_are_those_of_peft() -> None:
    peft = pytest.importorskip("peft")
    ours, theirs = build_model(spec(), seed=1), build_model(spec(), seed=1)
    Lora(ours, rank=3, alpha=6.0, targets=("q", "k", "down"))
    config = peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=["q", "k", "down"])
    peft.inject_adapter_in_model(config, theirs)
    assert set(ours.state_dict()) == set(theirs.state_dict())
    with torch.no_grad():
        for name, value in ours.named_parameters():
            if ".lora_B" in name:
                value.normal_()
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS))
