"""Ranks that a launcher started: a run refuses those that its manifest does not ask for."""

from __future__ import annotations

import pytest

from caramba.config.parallel import ParallelConfig
from caramba.errors import ConfigError
from caramba.runtime import check_world, get_world_size, join_ranks


def test_other_ranks_than_the_manifest_asks_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert get_world_size() == 2
    with (
        pytest.raises(ConfigError, match="WORLD_SIZE=2, and parallel=single is one process; add parallel=ddp"),
        join_ranks(ParallelConfig(), "cpu"),
    ):
        pass
    check_world(ParallelConfig(strategy="ddp"), 3)
    with pytest.raises(ConfigError, match=r"dp=4 x tp=1 are 4 ranks, and the launcher started 2"):
        check_world(ParallelConfig(strategy="ddp", dp=4), 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dp": 2}, "parallel=single is one process, got dp=2"),
        ({"strategy": "ddp", "tp": 2}, "parallel=ddp has no tp"),
        ({"strategy": "fsdp2", "sharding": "NO_SHARD"}, "which is parallel=ddp; use that"),
        ({"strategy": "ddp", "wrap": ("ResidualTopology",)}, "wrap belongs to parallel=fsdp2"),
        ({"strategy": "fsdp2", "find_unused_parameters": True}, "belongs to parallel=ddp"),
        ({"bucket_cap_mb": 100}, "bucket_cap_mb belongs to parallel=ddp, got parallel=single"),
        ({"reduce_dtype": "bfloat16"}, "belongs to parallel=ddp and fsdp2, got parallel=single"),
    ],
)
def test_keys_of_another_strategy_are_refused(words: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ParallelConfig.model_validate(words)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_a_manifest_of_before_is_read(strategy: str) -> None:
    ParallelConfig.model_validate({"strategy": strategy, "bucket_cap_mb": 25})
