"""The generation benchmark on tiny real models, and its counts on texts that are worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from caramba.artifacts.items import from_column, items_csv
from caramba.artifacts.metrics import collect
from caramba.artifacts.tables import NOTHING, list_tables
from caramba.config.benchmark import BenchmarkConfig
from caramba.config.model import ModelSpec
from caramba.data import TokenDataset
from caramba.errors import DataError
from caramba.evaluation.generation import count_wins, measure_distinct, measure_repetition
from caramba.evaluation.subject import Subjects
from caramba.evaluation.suite import run_benchmark
from caramba.model import build_model
from caramba.result import ITEMS, BenchmarkResult, RunResult

SPEC = ModelSpec.model_validate(
    {
        "embedder": {"vocab_size": 40, "d_model": 16},
        "topology": {
            "type": "StackedTopology",
            "layers": [
                {
                    "type": "ResidualTopology",
                    "layers": [
                        {"type": "RMSNormLayer", "d_model": 16},
                        {"type": "AttentionLayer", "d_model": 16, "n_heads": 2},
                    ],
                },
                {"type": "RMSNormLayer", "d_model": 16},
            ],
        },
    }
)


@pytest.fixture(name="subjects")
def _subjects() -> Subjects:
    tokens = np.random.default_rng(0).integers(0, 40, 2000).astype(np.uint16)
    models = {"teacher": build_model(SPEC, seed=1), "student": build_model(SPEC, seed=2)}
    return Subjects(models, lambda size: TokenDataset(tokens, size), None, 40, torch.device("cpu"))


def benchmark(**config: object) -> BenchmarkConfig:
    plain = {
        "type": "generation",
        "num_prompts": 6,
        "prompt_length": 8,
        "max_new_tokens": 12,
        "batch_size": 4,
    } | config
    return BenchmarkConfig.model_validate({"id": "gen", "config": plain})


def test_shares_of_texts_worked_out_by_hand() -> None:
    assert measure_repetition([1, 2, 3, 4, 5, 6]) == 0
    assert measure_repetition([1, 1, 1, 1, 1, 1]) == pytest.approx(2 / 3)
    assert measure_repetition([1, 2, 3]) == 0, "shorter than one 4-gram"
    assert measure_distinct([1, 2, 1, 2], 1) == 0.5
    assert measure_distinct([1, 2, 1, 2], 2) == pytest.approx(2 / 3)
    assert measure_distinct([], 1) == 0


def test_count_wins_by_margin() -> None:
    found = count_wins([-2.0, -2.0, -2.0, -2.0], [-3.0, -2.005, -1.995, -1.0], 0.01)
    assert found == {"win_rate": [1, 0, 0, 0], "win_tie_rate": [1, 1, 1, 0]}


def test_benchmark_measures_each_model_and_compares_with_the_teacher(subjects: Subjects) -> None:
    metrics, rows = run_benchmark(benchmark(), subjects)
    found = {metric.key: metric for metric in metrics}
    assert {key.split(".")[2] for key in found if ".student." in key} == {
        *("repetition@gen=12", "distinct_1@gen=12", "distinct_2@gen=12", "length@gen=12"),
        *("win_rate@gen=12", "win_tie_rate@gen=12"),
    }
    assert not [key for key in found if ".teacher.win" in key]
    assert found["generation.student.length@gen=12"].value == 12
    assert all(0 <= metric.value <= 1 for key, metric in found.items() if "length" not in key)
    assert all(metric.n == 6 and metric.standard_error is not None for metric in metrics)
    assert [row["model"] for row in rows] == ["teacher", "student"]
    assert run_benchmark(benchmark(), subjects)[0] == metrics, "the same seeds give the same texts"


def test_equal_models_tie_everywhere_and_a_trained_one_wins(subjects: Subjects) -> None:
    model = subjects.models["teacher"]
    equal = dataclasses.replace(subjects, models={"teacher": model, "student": model})
    values = {metric.key: metric.value for metric in run_benchmark(benchmark(), equal)[0]}
    assert values["generation.student.win_rate@gen=12"] == 0
    assert values["generation.student.win_tie_rate@gen=12"] == 1
    student = build_model(SPEC, seed=1)
    ones = np.arange(2000) % 4
    text = dataclasses.replace(
        subjects,
        models={"teacher": model, "student": student},
        windows=lambda size: TokenDataset(ones.astype(np.uint16), size),
    )
    optimizer = torch.optim.Adam(student.parameters(), lr=0.03)
    tokens = torch.from_numpy(ones[:65])[None]
    for _ in range(40):
        loss = torch.nn.functional.cross_entropy(student(tokens[:, :-1])[0], tokens[0, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    values = {metric.key: metric.value for metric in run_benchmark(benchmark(), text)[0]}
    assert values["generation.student.win_rate@gen=12"] == 1
    assert values["generation.student.repetition@gen=12"] > 0.4, "a cycle of four tokens repeats"


def test_too_short_text_is_named(subjects: Subjects) -> None:
    with pytest.raises(DataError, match=r"block_size|prompt_length"):
        run_benchmark(benchmark(prompt_length=1500, max_new_tokens=1000), subjects)


def test_prompts_are_kept_and_shown_in_a_table(subjects: Subjects) -> None:
    bench = benchmark()
    metrics, rows = run_benchmark(bench, subjects)
    items = {row["model"]: from_column(row[ITEMS]) for row in rows}
    ours, theirs = items["student"], items["teacher"]
    assert ours.texts == theirs.texts
    margin = 0.01
    wins = [theirs_nll - ours_nll > margin for ours_nll, theirs_nll in zip(ours.scores, theirs.scores, strict=True)]
    values = {metric.key: metric.value for metric in metrics}
    assert values["generation.student.win_rate@gen=12"] == pytest.approx(sum(wins) / len(wins))
    kept = BenchmarkResult("gen", "generation", tuple(metrics), tuple(rows))
    result = RunResult("demo", "r", "ab" * 32, None, {}, {}, benchmarks=(kept,))
    assert items_csv(result) is not None
    (table,) = [one for one in list_tables(result, collect(result)) if one.label == "generation"]
    assert table.head == ("Metric", "Teacher", "Student")
    shown = {row[0].text: [cell.text for cell in row[1:]] for row in table.rows}
    assert shown["Wins and ties, share ↑ (gen 12)"][0] == NOTHING
    assert len(shown) == 6
    assert "standard error" in table.after
    alone = dataclasses.replace(subjects, models={"student": subjects.models["student"]})
    metrics, rows = run_benchmark(bench, alone)
    kept = BenchmarkResult("gen", "generation", tuple(metrics), tuple(rows))
    result = RunResult("demo", "r", "ab" * 32, None, {}, {}, benchmarks=(kept,))
    (table,) = [one for one in list_tables(result, collect(result)) if one.label == "generation"]
    assert table.head == ("Metric", "Model")
