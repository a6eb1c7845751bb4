"""Values of two ranks are exchanged as JSON or as weights-only torch files: a message runs no code."""

from __future__ import annotations

import contextlib
import math
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from caramba.runtime import gather_objects, gather_on_main, is_main_process, merge_over_ranks
from tests.preloaded import start_ranks
from tests.ranks import leave_together, meet

RANKS = 2


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of another rank ran",)


def exchange(rank: int, folder: str) -> None:
    meet(rank, folder, RANKS, timedelta(seconds=60))
    # Messages of different lengths, and what strict JSON lacks.
    assert gather_objects({"a" * (rank + 1): math.inf if rank else 0.5}) == [{"a": 0.5}, {"aa": math.inf}]
    assert merge_over_ranks({"both": rank + 1.0, f"own{rank}": 3.0}) == {
        "both": 1.5,
        "own0": 3.0,
        "own1": 3.0,
    }
    state = {"x": torch.full((rank + 1,), float(rank)), "rng": torch.get_rng_state(), "n": (rank, None)}
    found = gather_on_main(state)
    assert (found is None) == (not is_main_process())
    if found is not None:
        assert [part["n"] for part in found] == [(0, None), (1, None)]
        assert torch.equal(found[1]["x"], torch.ones(2))
        assert torch.equal(found[0]["rng"], state["rng"])
    with pytest.raises(pickle.UnpicklingError) if rank == 0 else contextlib.nullcontext():
        gather_on_main(Code())
    with pytest.raises(TypeError, match="not JSON serializable"):
        gather_objects(Code())
    leave_together()


def test_exchange_of_two_ranks_gives_every_value_and_runs_no_code(tmp_path: Path) -> None:
    start_ranks(exchange, (str(tmp_path),), RANKS)
