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


@pytest.mark.parametrize("tp", ["2d", "2.5D", "3-D", "2x2", [2, 2]])
def test_a_split_in_several_dimensions_is_refused_with_a_reason(tp: object) -> None:
    with pytest.raises(ValidationError, match=r"2-D, 2\.5-D and 3-D splits exchange blocks of weights too"):
        ParallelConfig.model_validate({"strategy": "fsdp2_tp", "tp": tp})


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
    several = manifest.model_copy(update={"parallel": ParallelConfig(strategy="ddp")})
    with pytest.raises(ConfigError, match=r"benchmark 'steps': the ladder .* in one process, got parallel=ddp"):
        check_parallel(several)


def test_layers_that_ranks_cannot_share_are_refused_before_any_is_started() -> None:
    """By the same rules as the split itself, from the manifest alone, with the place of the layer."""
    norm = {"type": "RMSNormLayer", "d_model": 12}
    attention = {"type": "AttentionLayer", "d_model": 12, "n_heads": 6, "n_kv_heads": 2, "mode": "gqa"}
    block = {"type": "ResidualTopology", "layers": [norm, attention]}
    rest = [{"type": "SwiGLULayer", "d_model": 12, "d_ff": 21}, {"type": "DropoutLayer", "p": 0.1}]
    nested = {"type": "NestedTopology", "layers": [block, *rest], "repeat": 2}
    network = {
        "embedder": {"vocab_size": 300, "d_model": 12},
        "topology": {"type": "StackedTopology", "layers": [nested, norm]},
    }
    run = {"id": "r", "train": {"phase": "pretrain", "trains": "student", "steps": 1, "block_size": 6}}
    group = {"name": "g", "data": {"type": "stdlib", "tokenizer": "byte"}, "runs": [run]}
    found = []
    for values in ({"tp": 3}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 6}):
        parallel = ParallelConfig.model_validate({"strategy": "fsdp2_tp", **values})
        layers = nested["layers"] if values.get("sequence_parallel") is None else [block, rest[1]]
        topology = {"type": "StackedTopology", "layers": [{**nested, "layers": layers}, norm]}
        tree = {"name": "x", "model": {**network, "topology": topology}, "groups": [group]}
        with pytest.raises(ConfigError) as caught:
            check_parallel(Manifest.model_validate(tree).model_copy(update={"parallel": parallel}))
        found.append(str(caught.value))
    stem, at = "run 'r': tensor parallel: ", "model.topology.layers[0].layers"
    assert found == [
        f"{stem}3 ranks cannot share n_kv_heads=2 heads; use one of 2 ({at}[0].layers[1])",
        f"{stem}2 ranks cannot share d_ff=21 features; use a multiple of 2, or fewer ranks ({at}[1])",
        f"{stem}with sequence_parallel a DropoutLayer with p=0.1 would drop the same features of other tokens on each "
        f"of 2 ranks; use p=0, or sequence_parallel=false ({at}[1])",
        f"{stem}6 ranks cannot share n_kv_heads=2 heads; use one of 2 ({at}[0].layers[1])",
    ]
