"""Orders to ranks are JSON of a closed schema: they come back equal, and anything else is refused without running it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.unit.model.model_specs import ATTENTION, transformer

from caramba.config.train import PhaseConfig
from caramba.data.checkpoint.network import spec_of
from caramba.errors import CarambaError
from caramba.experiment.ranks import PhaseCommand
from caramba.model import build_model
from caramba.runtime import AttentionChoice, Ranks
from caramba.runtime.runtime_plan import plan

PHASES = (
    {"phase": "pretrain", "steps": 3, "batch_size": 2, "block_size": 8},
    {"phase": "blockwise", "steps": 3, "lr": 1e-3},
)


def order_of(name: str, phase: dict[str, Any]) -> PhaseCommand:
    config = PhaseConfig.model_validate(phase)
    spec = build_model(transformer(name), device="meta").spec
    decided = plan(config, device="cpu", kernels="auto", ops={"quantize": "reference"}, name="x", d_model=32)
    attention = AttentionChoice(("flash", "math"), True, "measured", measured_ms={"64x64.flash": 0.25})
    return PhaseCommand("main", config, decided, 1, 2**62, 3, spec_of(spec), None, attention, 12.5, "x", "f" * 64)


def ranks_of(store: Any) -> Ranks:
    return Ranks(0, 2, store)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", sorted(ATTENTION))
def test_order_through_the_store_comes_back_equal(name: str, phase: dict[str, Any]) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    sender, reader = ranks_of(store), ranks_of(store)
    given = order_of(name, phase)
    sender.order(given.to_json())
    sender.order(None)
    text = reader.next_order()
    assert text is not None
    assert PhaseCommand.from_json(text) == given
    assert reader.next_order() is None


class Code:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_pickle_in_the_store_is_refused_and_not_run(tmp_path: Path) -> None:
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        store.set(f"order/{protocol}", pickle.dumps(Code(tmp_path / "ran"), protocol))  # pyright: ignore
    ranks = ranks_of(store)
    for _ in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises(CarambaError, match=r"ranks: .*rank 0"):
            PhaseCommand.from_json(ranks.next_order() or "")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": "1"}, "seed"),
        ({"seed": True}, "seed"),
        ({"extra": 1}, "extra"),
        ({"model": None}, "model"),
        ({"phase": {"phase": "pretrain", "steps": -1}}, "phase.steps"),
        ({"plan": {"phase": "x"}}, "plan.signature"),
    ],
)
def test_order_with_a_wrong_value_is_refused_by_key(change: dict[str, Any], named: str) -> None:
    values = json.loads(order_of("standard", PHASES[0]).to_json()) | change
    with pytest.raises(CarambaError, match=rf"not valid at {named}: "):
        PhaseCommand.from_json(json.dumps(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "1", '"x"', "null", "[" * 100_000])
def test_order_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(CarambaError, match="an order from rank 0 is not valid at the text"):
        PhaseCommand.from_json(text)
