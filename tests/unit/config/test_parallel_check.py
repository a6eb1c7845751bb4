"""What a strategy cannot train is refused by name."""

from __future__ import annotations

import pytest

from caramba.config.benchmark import BenchmarkConfig
from caramba.config.manifest import Manifest
from caramba.config.parallel import ParallelConfig
from caramba.config.parallel_check import check_parallel, conflicts
from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError

CONVERGENCE = {"target": 0.1, "patience": 2}


def problems(phase: dict[str, object], **parallel: object) -> str:
    train = PhaseConfig.model_validate({"steps": 4, "batch_size": 2, "block_size": 8, **phase})
    return "\n".join(conflicts(train, ParallelConfig.model_validate(parallel)))


@pytest.mark.parametrize(
    ("phase", "parallel", "said"),
    [
        (
            {"phase": "drift"},
            {"strategy": "ddp", "blockwise": "blocks"},
            "phase=drift reads the student's own",
        ),
        (
            {"phase": "blockwise", "convergence": CONVERGENCE},
            {"strategy": "ddp", "blockwise": "blocks"},
            "use parallel.blockwise=data, or remove convergence",
        ),
        ({"phase": "blockwise"}, {"strategy": "fsdp2_tp", "tp": 2}, "trains attention layers one by one"),
        ({"phase": "drift"}, {"strategy": "fsdp2_tp", "tp": 2}, "trains attention layers one by one"),
        (
            {"phase": "global", "objective": "kl", "hidden_weight": 0.5},
            {"strategy": "fsdp2_tp", "tp": 2},
            "hidden_weight is not made for sharded weights, got parallel=fsdp2_tp",
        ),
    ],
)
def test_a_phase_that_its_ranks_cannot_train_is_refused(
    phase: dict[str, object], parallel: dict[str, object], said: str
) -> None:
    assert said in problems(phase, **parallel)


def test_block_phases_share_the_data() -> None:
    for phase in ("blockwise", "drift"):
        assert not problems({"phase": phase, "convergence": CONVERGENCE}, strategy="ddp")


def test_the_ladder_is_climbed_by_one_process() -> None:
    bench = BenchmarkConfig.model_validate({"id": "steps", "config": {"type": "ladder"}})
    norm = {"type": "RMSNormLayer", "d_model": 8}
    network = {
        "embedder": {"vocab_size": 300, "d_model": 8},
        "topology": {"type": "StackedTopology", "layers": [norm]},
    }
    group = {"name": "g", "data": {"type": "stdlib", "tokenizer": "byte"}, "benchmarks": [bench]}
    manifest = Manifest.model_validate({"name": "x", "model": network, "groups": [group]})
    check_parallel(manifest)
    several = manifest.model_copy(update={"parallel": ParallelConfig(strategy="ddp")})
    with pytest.raises(
        ConfigError, match=r"benchmark 'steps': the ladder .* in one process, got parallel=ddp"
    ):
        check_parallel(several)
