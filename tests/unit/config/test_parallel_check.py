"""What a strategy cannot train is refused by name."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from caramba.config.benchmark import BenchmarkConfig
from caramba.config.manifest import Manifest
from caramba.config.parallel import ParallelConfig
from caramba.config.parallel_check import check_parallel, conflicts
from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError

STAGES = {"strategy": "pipeline", "pp": 2}
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
            {"phase": "pretrain", "block_size": 33},
            {"strategy": "fsdp2_tp", "tp": 2, "sequence_parallel": True},
            "got block_size=33; use a multiple of 2, or sequence_parallel=false",
        ),
        (
            {"phase": "global", "objective": "kl", "hidden_weight": 0.5},
            {"strategy": "fsdp2_tp", "tp": 2},
            "hidden_weight is not made for sharded weights, got parallel=fsdp2_tp",
        ),
        (
            {"phase": "blockwise"},
            STAGES,
            "phase=blockwise reads a teacher, which parallel=pipeline does not cut",
        ),
        (
            {"phase": "global", "objective": "kl"},
            STAGES,
            "phase=global with objective=kl reads a teacher",
        ),
        (
            {"phase": "pretrain", "batch_size": 3},
            STAGES,
            "equal parts, got batch_size=3; use a multiple of 2",
        ),
        ({"phase": "pretrain", "ema_decay": 0.9}, STAGES, "ema_decay is not made for the stages"),
        (
            {"phase": "pretrain", "batch_size": "auto"},
            STAGES,
            "batch_size is chosen by measuring one process, and parallel=pipeline has a part of the model on every "
            "rank; give it a value",
        ),
        (
            {"phase": "pretrain", "batch_size": "auto", "compile_model": "auto"},
            STAGES,
            "batch_size, compile_model are chosen by measuring one process, and parallel=pipeline has a part of the "
            "model on every rank; give them values",
        ),
    ],
)
def test_a_phase_that_its_ranks_cannot_train_is_refused(
    phase: dict[str, object], parallel: dict[str, object], said: str
) -> None:
    assert said in problems(phase, **parallel)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"strategy": "pipeline"}, "needs parallel.pp of 2 or more, got 1"),
        ({"pp": 2}, "pp=2 belongs to parallel=pipeline, got parallel=single"),
        ({"strategy": "ddp", "num_micro_batches": 4}, "num_micro_batches=4 belongs to parallel=pipeline"),
        ({**STAGES, "dp": 2}, "one pipeline, without replicas, got dp=2"),
        ({**STAGES, "tp": 2}, "parallel=pipeline has no tp, got tp=2"),
        ({**STAGES, "pp": 4, "num_micro_batches": 3}, "leaves some of the pp=4 stages without work"),
        ({"strategy": "ddp", "sequence_parallel": True}, "sequence_parallel belongs to parallel=fsdp2_tp"),
        ({**STAGES, "sharding": "FULL_SHARD"}, "sharding belongs to parallel=fsdp2, got parallel=pipeline"),
    ],
)
def test_sizes_that_make_no_pipeline_are_refused(parallel: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(said)):
        ParallelConfig.model_validate(parallel)


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
