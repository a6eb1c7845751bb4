"""What a rank holds beyond the process that a step is measured in, held against counts by hand."""

from __future__ import annotations

import pytest

from caramba.config.estimate import ModelCost, ParallelLayout, model_cost, rank_bytes
from caramba.config.parallel import ParallelConfig
from caramba.config.train import PhaseConfig
from caramba.launch.freeze import freeze


@pytest.fixture(scope="module")
def cost() -> ModelCost:
    return model_cost(freeze(["model=tiny", "train=pretrain", "benchmark=none"]).manifest.model)


def beyond(cost: ModelCost, ranks: int, phase: dict[str, object] | None = None, **parallel: object) -> int:
    described = PhaseConfig.model_validate({"phase": "pretrain", "steps": 9, "batch_size": "auto", **(phase or {})})
    return rank_bytes(described, cost, ParallelLayout(ParallelConfig.model_validate(parallel), ranks))


def test_ddp_adds_sums_that_are_narrower_than_gradients_and_nothing_else(cost: ModelCost) -> None:
    gradients = 4 * cost.params
    assert beyond(cost, 1, strategy="ddp", dp=1) == beyond(cost, 1) == 0
    assert beyond(cost, 2, strategy="ddp", dp=2) == 0
    narrow = {"strategy": "ddp", "dp": 2, "reduce_dtype": "bfloat16"}
    assert beyond(cost, 2, **narrow) == gradients // 2, "a small model goes in one exchange"
    assert beyond(cost, 2, {"dtype": "bfloat16", "use_amp": False}, **narrow) == 0
    assert beyond(cost, 2, {"lora": {}, "phase": "global"}, **narrow) == 0
    two = 2 * 2 * cost.embedder_params
    assert beyond(cost, 2, bucket_cap_mb=1, **narrow) == two < gradients // 2, "of the largest weight"


def test_fsdp2_takes_off_what_other_ranks_hold_throughout_a_step(cost: ModelCost) -> None:
    kept = 12 * cost.params  # weights and two states; of gradients nothing, they may come after the peak
    two, many = (beyond(cost, ranks, strategy="fsdp2", dp=ranks) for ranks in (2, 10**9))
    gathered = kept + many - 12  # of ever so many ranks one element is a rank's own
    assert two == -kept + 12 * -(-cost.params // 2) + gathered
    assert -kept < many < two < 0 < gathered < kept
    assert beyond(cost, 2, {"phase": "blockwise"}, strategy="fsdp2", dp=2) == 0
    phase = PhaseConfig(phase="pretrain", steps=9)
    spread = ParallelLayout(ParallelConfig(strategy="fsdp2", dp=2), 2)
    assert rank_bytes(phase, cost, spread, keeps_whole=True) == two + 4 * cost.params
    sgd = beyond(cost, 2, {"optimizer": "sgd"}, strategy="fsdp2", dp=2)
    assert sgd == two + 4 * (cost.params - -(-cost.params // 2))
    bare = beyond(cost, 2, {"optimizer": "sgd", "momentum": 0.0}, strategy="fsdp2", dp=2)
    assert bare == two + 8 * (cost.params - -(-cost.params // 2)), "without momentum there is no state to share"
