"""The long-context benchmark on tiny models: its rows, its scores, and perplexity by position."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.infer.test_generator import byte_spec
from torch.nn import functional as F

from caramba.artifacts.metrics import collect
from caramba.artifacts.recall import draw_far_back
from caramba.artifacts.tables import list_tables
from caramba.config.benchmark import LongContextBenchmarkConfig
from caramba.data import ByteTokenizer, TokenDataset, Tokenizer
from caramba.errors import ConfigError
from caramba.evaluation.long_context import _ask, _questions, long_context
from caramba.evaluation.subject import Subjects
from caramba.infer.nll import windowed_nll
from caramba.model import build_model
from caramba.result import BenchmarkResult, RunResult

TOKENIZER = ByteTokenizer()
TEXT = np.frombuffer(b"Some held-out text with words in it. " * 300, dtype=np.uint8).astype(np.int64)


def config(**changes: Any) -> LongContextBenchmarkConfig:
    given = {"type": "long_context", "lengths": [300, 600], "items": 4, "pairs": 3, "windows": 5}
    return LongContextBenchmarkConfig.model_validate(given | changes)


def subjects(tokenizer: Tokenizer | None = TOKENIZER, **models: Any) -> Subjects:
    def windows(size: int) -> TokenDataset:
        return TokenDataset(TEXT, size)

    return Subjects(models, windows, None, 257, torch.device("cpu"), tokenizer)


def test_rows_hide_what_their_end_asks_for() -> None:
    for length in (300, 600):
        asked = list(_questions(config(), length, TokenDataset(TEXT, 600), TOKENIZER))
        assert [question.task for question in asked] == ["needle"] * 4 + ["recall"] * 4
        for question in asked:
            text = TOKENIZER.decode(question.tokens)
            assert len(question.tokens) == length
            body, answer = text[: -question.n_answer], text[-question.n_answer :]
            key = body.rpartition("The ")[2]
            assert body.count(f"The {key}{answer}. Remember it.") == 1
            place = body.index(f"The {key}{answer}") / length
            assert abs(place - question.depth) < 0.35
            assert body.count("Remember it") == (1 if question.task == "needle" else 3)
        assert len({question.tokens for question in asked}) == 8


def test_answers_are_scored_token_by_token() -> None:
    model = build_model(byte_spec(), seed=0).eval()
    asked = list(_questions(config(), 300, TokenDataset(TEXT, 600), TOKENIZER))
    scores = _ask(model, asked, 3, torch.device("cpu"))
    for question, (found, nll) in zip(asked, scores, strict=True):
        row = torch.tensor([question.tokens])
        logits = model(row[:, :-1])[0, -question.n_answer :]
        targets = row[0, -question.n_answer :]
        assert nll == pytest.approx(F.cross_entropy(logits, targets).item(), rel=1e-4)
        assert found == bool((logits.argmax(-1) == targets).all())


def test_metrics_of_every_length_and_position() -> None:
    teacher, student = (build_model(byte_spec(), seed=seed) for seed in (0, 1))
    metrics, rows = long_context(config(), subjects(teacher=teacher, student=student), "long")
    found = {metric.key: metric for metric in metrics}
    for name in ("teacher", "student"):
        for length in (300, 600):
            assert found[f"long_context.{name}.needle@length={length}"].n == 4
            assert found[f"long_context.{name}.recall_answer_nll@length={length}"].value > 0
            by_depth = [found[f"long_context.{name}.needle@length={length},depth={n}"].n for n in (10, 30, 70, 90)]
            assert by_depth == [1, 1, 1, 1]
    bench = BenchmarkResult("long", "long_context", tuple(metrics), tuple(rows))
    result = RunResult("far", "id", "0", None, {}, {}, benchmarks=(bench,))
    tables = {table.label: table.rows for table in list_tables(result, collect(result))}
    assert len(tables["depths"]) == 2 * 2 * 2
    assert [cell.is_number for cell in tables["depths"][0][3:]] == [True, True, False, True, True]
    assert draw_far_back(result, collect(result)) is not None
    bins = [row for row in rows if row["task"] == "perplexity" and row["model"] == "student"]
    assert (bins[0]["from"], bins[-1]["to"]) == (0, 599)
    total = sum(row["nll"] * (row["to"] - row["from"] + 1) for row in bins) / 600
    whole = windowed_nll(student, TokenDataset(TEXT, 600), windows=5, batch_size=2, device=torch.device("cpu"))
    assert total == pytest.approx(whole.mean, rel=1e-5)
    key = f"long_context.student.perplexity@from=512,to={599},length=600"
    assert found[key].value == pytest.approx(math.exp(bins[-1]["nll"]))


def test_what_cannot_be_measured_is_refused() -> None:
    model = build_model(byte_spec(), seed=0)
    with pytest.raises(ConfigError, match="which tokenizer made it"):
        long_context(config(), subjects(None, student=model), "long")
    with pytest.raises(ConfigError, match="do not fit length 100"):
        long_context(config(lengths=[100]), subjects(student=model), "long")
    with pytest.raises(ValueError, match="names one twice"):
        config(lengths=[300, 300])
