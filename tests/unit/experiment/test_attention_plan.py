"""What a plan says of attention layers with a kernel of their own."""

from __future__ import annotations

import pytest

from caramba.config.layer import AttentionLayerConfig
from caramba.experiment.session import attention_decisions
from caramba.ops import backend
from caramba.runtime import AttentionChoice, Decision, RuntimePlan

CHOICE = AttentionChoice(None, False, "measured")
PLAIN = AttentionLayerConfig(d_model=128, n_heads=2)
WIDE = AttentionLayerConfig.model_validate(
    {
        "mode": "decoupled",
        "layout": "latent",
        **{"d_model": 128, "n_heads": 2, "head_dim": 64, "sem_dim": 128, "geo_dim": 256},
    }
)


def plan(dtype: str = "bfloat16") -> RuntimePlan:
    made = {"device": "cpu", "dtype": dtype, "compile_model": False}
    return RuntimePlan("x", "0", {}, {name: Decision(value, "made up") for name, value in made.items()})


@pytest.mark.parametrize("has_documents", [False, True])
def test_layers_of_two_parts_are_counted(monkeypatch: pytest.MonkeyPatch, has_documents: bool) -> None:
    def said(layers: list[AttentionLayerConfig], dtype: str = "bfloat16") -> dict[str, Decision]:
        return attention_decisions(plan(dtype), layers, CHOICE, has_documents=has_documents)

    masked = {"documents"} if has_documents else set()
    assert said([PLAIN, WIDE]).keys() == masked, "without a kernel there is nothing to say"
    monkeypatch.setitem(backend._attached, ("decoupled_attention", "cpu"), "triton")
    found = said([PLAIN, WIDE, WIDE])
    assert found["two_part_keys"].value == "decoupled_attention in 2 of 3 attention layers"
    assert found.keys() == {"two_part_keys"} | masked
    if has_documents:
        assert found["documents"].value == "decoupled_attention, mask"
    assert said([PLAIN, WIDE], "float32").keys() == masked
    assert said([PLAIN]).keys() == masked
