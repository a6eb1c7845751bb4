"""Low-rank updates: neutral at the start, alone in what trains, merged to the same function, named as in peft."""

from __future__ import annotations

import pytest
import torch

from caramba.distill import LanguageModelObjective, Lora
from caramba.errors import ConfigError
from caramba.model import build_model
from tests.unit.surgery.test_weight_svd import TOKENS, spec, student_spec

BATCH = (TOKENS[:, :-1], TOKENS[:, 1:])


def test_an_update_starts_neutral_trains_alone_and_merges_to_the_same_function() -> None:
    model = build_model(student_spec(4, 8, 8), seed=1).double()
    names, before = list(model.state_dict()), model(BATCH[0])
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    objective = LanguageModelObjective(model, lora=Lora(model, rank=2, alpha=4.0))
    torch.testing.assert_close(model(BATCH[0]), before, rtol=0, atol=0)
    trained = objective.trainable()
    assert all(".lora_A.default.weight" in name or ".lora_B.default.weight" in name for name, _ in trained)
    optimizer = torch.optim.SGD([value for _, value in trained], lr=0.5)
    losses = []
    for _ in range(5):
        losses.append(float(objective.step(BATCH, lambda loss: loss.backward())["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    after = model(BATCH[0]).detach()
    objective.finish()
    assert list(model.state_dict()) == names, "merged: a plain model again"
    torch.testing.assert_close(model(BATCH[0]).detach(), after, rtol=1e-10, atol=1e-12)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, plain[name])}
    linear = {name for name in names if name.startswith("topology") and value_is_matrix(plain[name])}
    assert changed == {name for name in linear if "inv_freq" not in name}, "every linear layer, nothing else"


def value_is_matrix(value: torch.Tensor) -> bool:
    return value.ndim == 2


def test_targets_are_last_parts_of_names() -> None:
    model = build_model(spec(), seed=1)
    lora = Lora(model, rank=2, alpha=2.0, targets=("q", "down"))
    assert {name.rsplit(".", 1)[-1] for name in lora.names} == {"q", "down"}
    assert len(lora.names) == 4
    assert lora.names[0] in dict(model.named_modules())
    with pytest.raises(ConfigError, match=r"'w' names no linear layer of the model; names: down, .*, all-linear"):
        Lora(build_model(spec(), seed=1), rank=2, alpha=2.0, targets=("w",))
