"""Benchmarks on quantised caches: what they count, under which keys, and which settings they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from caramba.config.benchmark import BenchmarkConfig, PerplexityBenchmarkConfig
from caramba.config.estimate import model_cost
from caramba.config.kvcache import KVCacheKind
from caramba.config.model import ModelSpec
from caramba.data import TokenDataset, build_token_dataset
from caramba.evaluation import Subjects, run_benchmark
from caramba.evaluation.perplexity import CachedModel
from caramba.model import Model, build_model

VOCAB, BLOCK, TAIL = 29, 24, 4
KINDS = ("fp32", "q8_0", "q4_0", "nf4", "mixed")


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    norm = {"type": "RMSNormLayer", "d_model": 32}
    dba = {"mode": "decoupled", "layout": "latent", "head_dim": 8, "sem_dim": 32, "geo_dim": 32}
    models = {}
    for name, mode in (("teacher", {}), ("student", dba)):
        attention = {"type": "AttentionLayer", "d_model": 32, "n_heads": 4, **mode}
        layers = [{"type": "ResidualTopology", "layers": [norm, attention]}, norm]
        model = build_model(
            ModelSpec.model_validate(
                {
                    "embedder": {"vocab_size": VOCAB, "d_model": 32},
                    "topology": {"type": "StackedTopology", "layers": layers},
                }
            ),
            seed=1,
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)  # so that attention has a say
        models[name] = model
    file: Path = tmp_path_factory.mktemp("data") / "text.npy"
    np.save(file, np.random.default_rng(0).integers(0, VOCAB, 40 * BLOCK + 1).astype(np.uint16))
    dataset = build_token_dataset(path=str(file), block_size=BLOCK)
    return Subjects(models, lambda _: dataset, None, VOCAB, torch.device("cpu"))


def test_weights_of_no_group_are_a_row_that_says_why() -> None:
    """Inputs of 48 divide into no group of 4-bit codes; the other formats are measured all the same."""
    pytest.importorskip("torchao")
    layers = [{"type": "LinearLayer", "d_in": 48, "d_out": 48}, {"type": "RMSNormLayer", "d_model": 48}]
    topology = {"type": "StackedTopology", "layers": layers}
    spec = {"embedder": {"vocab_size": VOCAB, "d_model": 48}, "topology": topology}
    model = build_model(ModelSpec.model_validate(spec), seed=1)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, 400))
    data = TokenDataset(tokens.numpy().astype(np.uint16), BLOCK)
    subjects = Subjects({"teacher": model}, lambda _: data, None, VOCAB, torch.device("cpu"))
    _, rows = measured(subjects, type="weights", formats=["int4", "int8"], block_size=BLOCK, num_batches=1)
    said = {row["weights"]: row.get("skipped") for row in rows}
    assert "no linear layer of this model can be quantised" in said["int4"]
    assert said["int8"] is None


def measured(subjects: Subjects, **config: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    bench = BenchmarkConfig.model_validate({"id": "b", "config": config})
    metrics, rows = run_benchmark(bench, subjects)
    return {metric.key: metric.value for metric in metrics}, rows


def nll(subjects: Subjects, **config: Any) -> dict[str, float]:
    asked = {"block_size": BLOCK, "batch_size": 8, "num_batches": 2, "cache_tail_tokens": TAIL, **config}
    metrics, _ = measured(subjects, type="perplexity", **asked)
    return {key: value for key, value in metrics.items() if ".nll" in key}


def test_perplexity_through_a_cache_is_labelled_and_loses_by_format(subjects: Subjects) -> None:
    plain = nll(subjects)
    losses = {}
    for kind in KINDS:
        found = nll(subjects, cache_kind=kind)
        assert set(found) == {f"perplexity.{model}.nll@kind={kind}" for model in ("teacher", "student")}
        losses[kind] = max(
            abs(found[f"perplexity.{model}.nll@kind={kind}"] - plain[f"perplexity.{model}.nll"])
            for model in ("teacher", "student")
        )
    assert losses["fp32"] < 1e-6
    assert 1e-6 < losses["q8_0"] < losses["q4_0"]
    assert losses["q8_0"] < losses["nf4"]
    assert max(losses.values()) < 0.1
    rotated = nll(subjects, cache_kind="q4_0", cache_hadamard=True)
    assert rotated != nll(subjects, cache_kind="q4_0")


def test_chunks_store_what_single_tokens_store(subjects: Subjects) -> None:
    model = subjects.models["student"].eval()
    assert isinstance(model, Model)
    config = PerplexityBenchmarkConfig.model_validate(
        {"type": "perplexity", "block_size": BLOCK, "cache_kind": "q4_0", "cache_tail_tokens": TAIL}
    )
    x = subjects.windows(BLOCK)[0][0][None]
    with torch.no_grad():
        ctx = model.new_context(1, BLOCK, config.cache_kind, tail_tokens=TAIL)
        one_by_one = torch.cat([model(token, ctx) for token in x.split(1, dim=1)], dim=1)
        torch.testing.assert_close(CachedModel(model, config)(x), one_by_one, rtol=1e-4, atol=1e-4)
        assert (model(x) - one_by_one).abs().max() > 1e-3


def test_memory_counts_every_format_from_storage(subjects: Subjects) -> None:
    metrics, rows = measured(subjects, type="memory", sequence_lengths=[200], quantization_modes=list(KINDS))
    for kind in KINDS:
        for name, model in subjects.models.items():
            per_token = metrics[f"memory.{name}.kv_bytes_per_token@seq=200,kind={kind}"]
            assert per_token == model_cost(model.spec).kv_bytes_per_token(KVCacheKind(kind))
            (row,) = (row for row in rows if (row["model"], row["kind"]) == (name, kind))
            tail, slack = row["tail_bytes"], row["slack_bytes"]
            assert row["cache_bytes"] == (per_token * 200 if kind == "fp32" else per_token * 192 + tail + slack)
            # 200 tokens: three tiles of 64 and 8 in the tail, in 2 bytes
            assert tail == (0 if kind == "fp32" else 8 * 2 * 64)
    assert metrics["memory.student.kv_bytes_per_token@seq=200,kind=mixed"] == 18 + 34


def test_latency_runs_on_a_format(subjects: Subjects) -> None:
    config = {"prompt_lengths": [8], "generation_lengths": [3], "warmup_runs": 0, "timed_runs": 1}
    metrics, rows = measured(subjects, type="latency", cache_kind="mixed", **config)
    assert "latency.student.itl_ms@prompt=8,gen=3,batch=1,kind=mixed" in metrics
    assert {row["kind"] for row in rows} == {"mixed"}


def test_settings_that_would_measure_nothing_are_refused() -> None:
    def check(**config: Any) -> None:
        PerplexityBenchmarkConfig.model_validate({"type": "perplexity", **config})

    check(block_size=129, cache_kind="q4")
    check(block_size=16, cache_kind="fp16")
    with pytest.raises(ValidationError, match=r"block_size=128 fits the 16-bit tail of 2 x cache_tail_tokens=64"):
        check(block_size=128, cache_kind="q4_0")
    with pytest.raises(ValidationError, match=r"rotates before 4 bits, got cache_kind=q8_0; use one of q4_0, nf4"):
        check(cache_kind="q8_0", cache_hadamard=True)
    with pytest.raises(ValidationError, match=r"rotates before 4 bits, got cache_kind=None"):
        check(cache_hadamard=True)
