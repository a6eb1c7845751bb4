"""Two ranks of parallel=ddp decide alike, and AdamW alone in a portfolio is AdamW to the bit on them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from caramba.errors import CarambaError
from caramba.train.orchestration.orchestrator import agree
from tests.preloaded import start_ranks
from tests.ranks import leave_together, meet
from tests.unit.train.orchestrated import orchestrated, phase_of, train

RANKS = 2


def rank_main(rank: int, folder: str) -> None:
    meet(rank, folder, RANKS, timedelta(minutes=5))
    share = (rank, RANKS)
    places = [Path(folder, f"{name}_{rank}") for name in "abc"]
    for place in places:
        place.mkdir()
    keys = {"steps": 9, "gradient_accumulation_steps": 4, "save_every": None}
    plain = train(phase_of(**keys), places[0], share=share)
    alone = {"orchestrator_strategies": ["conservative_adamw"], "orchestrator_decision_interval": 4}
    ours = train(orchestrated(**keys, **alone), places[1], share=share)
    assert ours.weights == plain.weights
    slow = {"optimizer": "adamw", "rate": 0.02}
    found = train(
        orchestrated(
            steps=21,
            save_every=None,
            orchestrator_strategies={"slow": slow, "muon": None},
            orchestrator_initial_strategy="slow",
            orchestrator_min_steps_between_switches=20,
        ),
        places[2],
        share=share,
    )
    assert found.callback is not None
    choices = [one["choice"] for one in found.callback.orchestrator.journal.records]
    assert "muon" in choices
    assert bool(found.decisions) == (rank == 0), "rank 0 writes"
    value = torch.tensor([x for one in found.weights for x in one])
    others = [torch.empty_like(value) for _ in range(RANKS)]
    dist.all_gather(others, value)
    assert torch.equal(others[0], others[1])
    with pytest.raises(CarambaError, match="step 7: rank 0 decided for 'muon' and rank 1 for 'lion'"):
        agree(7, "muon" if rank == 0 else "lion")
    leave_together()


def test_two_ranks_decide_alike_and_adamw_alone_is_adamw(tmp_path: Path) -> None:
    start_ranks(rank_main, (str(tmp_path),), RANKS)
