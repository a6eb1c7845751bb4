from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from caramba.cli import main
from caramba.infer import greedy, greedy_until, load_model, score_continuations
from tests.integration.export.samples import GQA, loud, make_run, transformer

try:
    HARNESS = tuple(int(part) for part in version("lm_eval").split(".")[:3])
except PackageNotFoundError:
    HARNESS = (0,)
needs_harness = pytest.mark.skipif(HARNESS < (0, 4, 13), reason="needs lm-eval 0.4.13, older ones need transformers 4")
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

CHOICE = """\
task: cats_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: [cat, dog, the mat]
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """\
task: cats_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
UNTIL = """\
task: cats_until
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: "{{{{text}}}}"
generation_kwargs: {{until: ["a", "."], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
DOCUMENTS = [
    {
        "q": "the",
        "answer": 0,
        "text": "the cat sat on the mat, and then a dog came and barked at it for an hour.",
    },
    {"q": "a bird saw the ", "answer": 2, "text": "x"},
    {
        "q": "one dog ran in the park and then through all the streets of the town to",
        "answer": 1,
        "text": "ran home",
    },
]
TASKS = ("cats_choice", "cats_rolling", "cats_until")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a tiny Llama-shaped model, and a folder of tasks with their data."""
    root = tmp_path_factory.mktemp("eval")
    os.environ["HF_HOME"] = str(root / "hf")
    os.environ["HF_DATASETS_CACHE"] = str(root / "hf/datasets")
    tasks = root / "tasks"
    tasks.mkdir()
    data = tasks / "cats.json"
    data.write_text("\n".join(json.dumps(item) for item in DOCUMENTS))
    for text in (CHOICE, ROLLING, UNTIL):
        filled = text.format(data=data)
        (tasks / f"{filled.split()[1]}.yaml").write_text(filled)
    return make_run(root, loud(transformer(GQA)), block_size=48), tasks


def numbers(results: dict) -> dict[str, float]:
    return {
        f"{task}.{key}": value
        for task, found in results["results"].items()
        for key, value in found.items()
        if isinstance(value, int | float) and "stderr" not in key
    }


@needs_harness
@pytest.mark.slow
def test_results_equal_the_harness_own_backend_on_the_exported_folder(place, tmp_path, capsys):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    run, tasks = place
    words = ["eval", str(run), "--tasks", ",".join(TASKS), "--include-path", str(tasks), "--device", "cpu"]
    assert main(words) == 0
    assert "cats_choice" in capsys.readouterr().out
    (file,) = (run / "evals").glob("student-*.json")
    ours = json.loads(file.read_text())
    assert ours["labels"] == {"proxy": "untrained"}
    assert ours["max_length"] == 48

    assert main(["export", str(run), "--out", str(tmp_path / "out")]) == 0
    backend = HFLM(pretrained=str(tmp_path / "out"), device="cpu", batch_size=1, dtype="float32")
    assert backend.max_length == 48
    theirs = simple_evaluate(
        model=backend,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    found, expected = numbers(ours), numbers(theirs)
    assert found.keys() == expected.keys()
    assert {task.split(".")[0] for task in found} == set(TASKS)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-4), key

    from caramba.evaluation.lm_eval import CarambaLM

    opened = load_model(str(run))
    adapter = CarambaLM(opened.model, opened.tokenizer, max_length=48, batch_size=2)
    again = simple_evaluate(
        model=adapter,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        log_samples=True,
        bootstrap_iters=0,
    )
    for task in TASKS:
        for one, other in zip(again["samples"][task], theirs["samples"][task], strict=True):
            if task == "cats_until":
                assert one["resps"] == other["resps"]
                assert len(one["resps"][0][0]) > 0
            else:
                mine, yours = json.dumps(one["filtered_resps"]), json.dumps(other["filtered_resps"])
                flat = zip(_floats(json.loads(mine)), _floats(json.loads(yours)), strict=True)
                assert all(a == pytest.approx(b, rel=1e-4) for a, b in flat)


def _floats(value) -> list[float]:
    if isinstance(value, list):
        return [item for inner in value for item in _floats(inner)]
    return [float(value == "True") if isinstance(value, str) else float(value)]


@needs_harness
def test_a_limit_and_repeatable_mistakes(place, tmp_path, capsys):
    run, tasks = place
    for words, text in (
        (["--tasks", "cats_choice", "--include-path", str(tmp_path / "none")], "not a folder"),
        (["--tasks", "cats_choice", "--limit", "none"], "whole number"),
        ([], "--tasks"),
    ):
        assert main(["eval", str(run), *words, "--device", "cpu"]) == 2
        assert text in capsys.readouterr().err
    assert (
        main(
            [
                "eval",
                str(run),
                "--tasks",
                "cats_choice",
                "--include-path",
                str(tasks),
                "--limit",
                "2",
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    file = run / "evals/student-cats_choice.json"
    assert json.loads(file.read_text())["n-samples"]["cats_choice"]["effective"] == 2


def test_scores_are_those_of_one_forward_each_whatever_the_batch():
    model = loud(transformer(GQA))
    pairs = [([1, 2, 3], [4, 5]), ([9], [8, 7, 6, 5]), (list(range(30)), [40]), ([5, 6], [])]
    batched = score_continuations(model, pairs, max_length=20, batch_size=3)
    for (context, continuation), scored in zip(pairs, batched, strict=True):
        row = torch.tensor([[*context, *continuation]])[:, -21:]
        with torch.no_grad():
            logprobs = model(row).log_softmax(-1)[0]
        expected = sum(
            logprobs[row.shape[1] - len(continuation) - 1 + at, token].item() for at, token in enumerate(continuation)
        )
        assert scored.logprob == pytest.approx(expected, abs=1e-4)
        assert scored.n_tokens == len(continuation)
    best = greedy(model, torch.tensor([[1, 2, 3]]), 3)[0, 3:].tolist()
    assert score_continuations(model, [([1, 2, 3], best)], max_length=20)[0].is_greedy
    worse = [*best[:2], (best[2] + 1) % 257]
    assert not score_continuations(model, [([1, 2, 3], worse)], max_length=20)[0].is_greedy


def test_greedy_until_ends_before_the_end_mark_and_after_a_stop():
    model = loud(transformer(GQA))
    free = greedy(model, torch.tensor([[1, 2, 3]]), 6)[0, 3:].tolist()
    assert greedy_until(model, [1, 2, 3], 6) == free
    first = free.index(free[2])
    assert greedy_until(model, [1, 2, 3], 6, eos_id=free[2]) == free[:first]
    assert greedy_until(model, [1, 2, 3], 6, is_done=lambda new: len(new) == 4) == free[:4]
    assert greedy_until(model, [1, 2, 3], 0) == []
