"""The recall benchmark on tiny models: its rows, its baselines, and that slots carry what is recalled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.unit.layer.test_memory_bank import layer_config, memory_model
from tests.unit.model.model_specs import transformer

from caramba.artifacts.metrics import collect
from caramba.artifacts.recall import draw_recall
from caramba.artifacts.tables import TIMES, list_tables
from caramba.cache import KVCacheKind
from caramba.config.benchmark import RecallBenchmarkConfig
from caramba.errors import ConfigError
from caramba.evaluation.recall import (
    IGNORED,
    SYMBOLS,
    _with_sizes,  # pyright: ignore[reportPrivateUsage]
    attentions,
    draw_rows,
    probe_spec,
    recall,
)
from caramba.evaluation.subject import Subjects
from caramba.model import build_model
from caramba.result import BenchmarkResult, RunResult


def config(**changes: Any) -> RecallBenchmarkConfig:
    given = {"type": "recall", "pairs": [3], "steps": 2, "batch_size": 4, "eval_batches": 2, "blocks": 1}
    return RecallBenchmarkConfig.model_validate(given | changes)


def subjects(**models: Any) -> Subjects:
    def no_windows(_: int) -> Any:
        raise AssertionError("recall draws its own rows")

    return Subjects(models, no_windows, None, 61, torch.device("cpu"))


def test_rows_ask_each_key_once_and_name_its_value() -> None:
    tokens, targets = draw_rows(5, 4, 20, torch.Generator().manual_seed(0))
    assert tokens.shape == targets.shape == (5, 24)
    for row, target in zip(tokens.tolist(), targets.tolist(), strict=True):
        pairs = dict(zip(row[0:8:2], row[1:8:2], strict=True))
        assert sorted(pairs) == sorted(row[20:])
        assert target[20:] == [pairs[key] for key in row[20:]]
        assert set(target[:20]) == {IGNORED}
        assert all(2 * SYMBOLS <= filler < 3 * SYMBOLS for filler in row[8:20])


def test_window_of_equal_bytes_takes_the_bytes_of_memory() -> None:
    nodes, sizes = attentions(layer_config()), {}
    for kind in ("memory", "window_equal_bytes"):
        model = build_model(probe_spec(nodes[kind], 16, 1), seed=0).eval()
        window = nodes[kind]["local_window"]
        ctx = model.new_context(1, 200 if kind == "memory" else window, KVCacheKind.BF16, static=True)
        sizes[kind] = ctx.nbytes()
    assert 0 <= sizes["window_equal_bytes"] - sizes["memory"] < 2 * 2 * 6 * 2 * 2  # less than a token


def test_recall_measures_every_attention_and_names_models_without_slots() -> None:
    metrics, rows = recall(
        config(seeds=2),
        subjects(student=memory_model(), teacher=build_model(transformer("standard"))),
        "recall",
    )
    skipped = [row for row in rows if "skipped" in row]
    assert [row["model"] for row in skipped] == ["teacher"]
    measured = [row for row in rows if "skipped" not in row]
    assert [row["attention"] for row in measured] == [
        kind for kind in ("memory", "window", "window_equal_bytes", "full") for _ in range(2)
    ]
    assert all(row["length"] == 16 * 7 for row in measured)
    keys = {metric.key for metric in metrics}
    assert "recall.student.recall@attention=full,pairs=3" in keys
    assert "recall.student.swapped_other@attention=memory,pairs=3" in keys
    assert "recall.student.swapped_other@attention=window,pairs=3" not in keys
    assert all(metric.n == 2 and metric.std is not None for metric in metrics)


def test_width_of_probes_sets_their_heads() -> None:
    layer = _with_sizes(layer_config(), config(d_model=12), 3)
    assert (layer.d_model, layer.n_heads, layer.n_kv_heads, layer.head_dim, layer.slots) == (12, 2, 2, 6, 3)
    build_model(probe_spec(attentions(layer)["full"], 12, 1))
    with pytest.raises(ConfigError, match="no multiple of the model's head width of 6; use 6"):
        _with_sizes(layer_config(), config(d_model=10), 5)


def test_grid_of_pairs_and_slots_and_ratios_of_a_context_have_a_table_and_a_plot() -> None:
    given = config(
        pairs=[2, 3],
        memory_slots=[3, 5],
        local_window=2,
        windows=4,
        steps=1,
        lengths=[64],
        ratios=[2, 8, 32],
        context_tokens=128,
    )
    metrics, rows = recall(given, subjects(student=memory_model()), "recall")
    near = [(row["attention"], row.get("slots"), row["pairs"]) for row in rows if "ratio" not in row]
    assert near[:-1] == [
        (kind, slots, pairs)
        for kind, slots in (
            *(("memory", 3), ("window", None), ("window_equal_bytes", 3), ("full", None)),
            *(("memory", 5), ("window_equal_bytes", 5)),
        )
        for pairs in (2, 3)
    ]
    # A state of 2 tokens is smaller than the slots; one of 8 tokens has 5 slots and a window of 3.
    far = [row for row in rows if "ratio" in row]
    assert [(row["ratio"], row["slots"], row["window"]) for row in far] == [(2, 5, 27), (8, 5, 3)]
    assert far[0]["cache_bytes"] > far[1]["cache_bytes"]
    full = next(row for row in rows if row["attention"] == "full" and row["length"] == 64)
    assert full["cache_bytes"] >= 66 * 2 * 2 * 2 * 6  # at least as many tokens in 16 bits, keys and values
    bench = BenchmarkResult("recall", "recall", tuple(metrics), tuple(rows))
    result = RunResult("memory", "id", "0", None, {}, {}, benchmarks=(bench,))
    collected = collect(result)
    tables = {table.label: table.rows for table in list_tables(result, collected)}
    assert len(tables["recall"]) == 12
    assert [[cell.text for cell in row[1:3]] for row in tables["contexts"]] == [
        ["64", f"{ratio}{TIMES}"] for ratio in (2, 8)
    ]
    assert all(row[3].is_number and row[4].is_number for row in tables["contexts"])
    picture = draw_recall(result, collected)
    assert picture is not None
    assert picture.png.startswith(b"\x89PNG")


@pytest.mark.slow
def test_trained_probe_recalls_within_a_full_window() -> None:
    given = config(pairs=[2], steps=300, batch_size=32, windows=1, attentions=["full"], lr=8e-3)
    metrics, _ = recall(given, subjects(student=memory_model(d_model=32, head_dim=16)), "recall")
    found = {metric.key: metric.value for metric in metrics}
    assert found["recall.student.recall@attention=full,pairs=2"] > 3 / SYMBOLS
