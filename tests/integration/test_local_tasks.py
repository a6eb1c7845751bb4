"""Local evaluation tasks: scores against separate forwards, bad files by line, and the command end to end."""

from __future__ import annotations

import bz2
import json
import math
from pathlib import Path

import pytest
import torch

from caramba.cli import main
from caramba.data import ByteTokenizer
from caramba.errors import DataError
from caramba.evaluation.local_tasks import group_means, open_tasks, score_task
from tests.integration.export.samples import GQA, loud, make_run, transformer

CHOICE = [
    {"id": "a", "context": "the cat", "choices": [" sat", " runs far"], "gold": 0},
    {"id": "b", "context": "a dog", "choices": [" is", " was here", " x"], "gold": 2},
    {"id": "c", "context": "some bird", "choices": [" flew", " fly"], "gold": 1},
]
PARTIAL = [
    {
        "context": "the cup",
        "choices": [" it fell", " she fell"],
        "contexts": ["the cup it", "the cup she"],
        "continuation": " fell",
        "gold": 1,
    }
]
CLOZE = [{"context": "one two", "target": " three"}, {"context": "a", "target": "b"}]
PAIRS = [
    {"UID": "u", "good": "he runs", "bad": "he run"},
    {"UID": "u", "good": "they run", "bad": "they runs"},
    {"UID": "v", "good": "it is", "bad": "it are"},
]
TEXT = "The quick brown fox jumps over the lazy dog. " * 8


def write_tasks(folder: Path) -> Path:
    folder.mkdir()
    for name, items in (("animals", CHOICE), ("winogrande", PARTIAL), ("pairs", PAIRS)):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps(item) for item in items) + "\n")
    with bz2.open(folder / "cloze.jsonl.bz2", "wt") as file:
        file.write("\n".join(json.dumps(item) for item in CLOZE))
    (folder / "fox.txt").write_text(TEXT)
    (folder / "README.md").write_text("no task")
    return folder


def logprob(model, context: list[int], rest: list[int]) -> float:
    """Score one continuation with one forward of its own."""
    row = torch.tensor([[*context, *rest]])
    with torch.no_grad():
        found = model(row).float().log_softmax(-1)[0]
    return sum(found[len(context) - 1 + at, token].item() for at, token in enumerate(rest))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("local")
    return make_run(root, loud(transformer(GQA)), block_size=48), write_tasks(root / "tasks")


def test_score_task_choices_equal_separate_forwards(place) -> None:
    model, tokenizer = loud(transformer(GQA)).eval(), ByteTokenizer()
    (task,) = open_tasks(place[1], ["animals"], limit=None, where="eval")
    found = score_task(task, model, tokenizer, max_length=48, batch_size=2)
    hits, hits_per_character = [], []
    for item, record in zip(CHOICE, found.items, strict=True):
        context = tokenizer.encode(item["context"])
        expected = [logprob(model, context, tokenizer.encode(choice)) for choice in item["choices"]]
        assert record["logprobs"] == pytest.approx(expected, abs=1e-4)
        assert record["id"] == item["id"]
        per_character = [value / (len(choice) - 1) for value, choice in zip(expected, item["choices"], strict=True)]
        hits.append(expected.index(max(expected)) == item["gold"])
        hits_per_character.append(per_character.index(max(per_character)) == item["gold"])
    assert [record["acc"] for record in found.items] == hits
    assert [record["acc_norm"] for record in found.items] == hits_per_character
    share = sum(hits) / 3
    assert found.scores["acc"] == (pytest.approx(share), pytest.approx(math.sqrt(share * (1 - share) / 2)))


def test_score_task_partial_context_has_both_forms(place) -> None:
    model, tokenizer = loud(transformer(GQA)).eval(), ByteTokenizer()
    (task,) = open_tasks(place[1], ["winogrande"], limit=None, where="eval")
    found = score_task(task, model, tokenizer, max_length=48, batch_size=4)
    item = PARTIAL[0]
    partial = [logprob(model, tokenizer.encode(text), tokenizer.encode(" fell")) for text in item["contexts"]]
    whole = [logprob(model, tokenizer.encode("the cup"), tokenizer.encode(text)) for text in item["choices"]]
    assert found.items[0]["logprobs"] == pytest.approx([*partial, *whole], abs=1e-4)
    assert found.main == "acc_norm"


def test_score_task_text_equals_loss_of_windows(place) -> None:
    model, tokenizer = loud(transformer(GQA)).eval(), ByteTokenizer()
    (task,) = open_tasks(place[1], ["fox"], limit=None, where="eval")
    found = score_task(task, model, tokenizer, max_length=32, batch_size=3)
    tokens = torch.tensor(tokenizer.encode(TEXT))
    n = (len(tokens) - 1) // 32
    rows = torch.stack([tokens[at * 32 : at * 32 + 33] for at in range(n)])
    with torch.no_grad():
        logits = model(rows[:, :-1]).float()
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
    assert found.n == n
    assert found.scores["nll"][0] == pytest.approx(losses.mean().item(), abs=1e-5)
    late = losses.view(n, 32)[:, 16:].mean().exp().item()
    assert found.scores["perplexity_at_16_31"][0] == pytest.approx(late, rel=1e-5)


def test_open_tasks_limit_keeps_evenly_spaced_items_and_some_of_each_kind(place) -> None:
    animals, pairs = open_tasks(place[1], ["animals", "pairs"], limit=1, where="eval")
    assert [item["id"] for item in animals.items] == ["a"]
    assert [item["UID"] for item in pairs.items] == ["u", "v"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is a list"),
        ('{"text": "x"}', "unknown format with keys text"),
        ('{"context": "a", "choices": [], "gold": 0}', "at least two texts"),
        ('{"context": "a", "choices": ["b", "c"], "gold": 2}', "gold='2'; expected an index from 0 to 1"),
        ('{"context": "", "choices": ["b", "c"], "gold": 0}', "not empty"),
        ('{"context": "a", "choices": ["b", "c"]}', "gold='None'"),
    ],
)
def test_open_tasks_names_file_and_line_of_a_bad_item(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text("\n" + line)
    with pytest.raises(DataError, match=r"bad\.jsonl:[12]: ") as error:
        open_tasks(tmp_path, ["bad"], limit=None, where="eval")
    assert message in str(error.value)


def test_group_means_counts_arc_once() -> None:
    class Result:
        def __init__(self, task: str, value: float) -> None:
            self.task, self.main, self.scores = task, "acc", {"acc": (value, None)}

    names = ("hellaswag", "mmlu", "openbook_qa", "piqa", "winogrande")
    results = [Result("arc_easy", 0.2), Result("arc_challenge", 0.4), *(Result(name, 0.9) for name in names)]
    assert group_means(results) == {"mha2mla": pytest.approx((0.3 + 5 * 0.9) / 6)}
    assert group_means(results[1:]) == {}


def test_eval_command_writes_items_and_refuses_mistakes(place, tmp_path: Path, capsys) -> None:
    run, tasks = place
    out = tmp_path / "found.json"
    words = ["eval", str(run), "--eval-data", str(tasks), "--device", "cpu", "--max-length", "40"]
    assert main([*words, "--tasks", "all", "--out", str(out)]) == 0
    assert "fox" in capsys.readouterr().out
    found = json.loads(out.read_text())
    assert set(found["tasks"]) == {"animals", "cloze", "fox", "pairs", "winogrande"}
    assert len(found["tasks"]["animals"]["items"]) == 3
    for extra, message in (
        (["--tasks", "animal"], "did you mean 'animals'"),
        (["--tasks", "mha2mla"], "no task 'arc_easy'"),
        (["--tasks", "animals", "--num-fewshot", "2"], "--num-fewshot"),
        (["--tasks", "animals", "--eval-data", str(tmp_path / "none")], "is not a folder"),
    ):
        assert main([*words, *extra]) == 2
        assert message in capsys.readouterr().err


def test_eval_files_compare_item_by_item(place, tmp_path, capsys) -> None:
    run, tasks = place
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    for file in files:
        words = [
            "eval",
            str(run),
            "--eval-data",
            str(tasks),
            "--tasks",
            "animals,cloze,fox",
            "--out",
            str(file),
        ]
        assert main([*words, "--max-length", "32", "--device", "cpu", "--smallest-difference", "1"]) == 0
    said = capsys.readouterr()
    assert "eval: animals: 3 items: too few to see any difference" in said.out
    assert "smallest_difference asks for 1.0" in said.err
    plain = json.loads(files[1].read_text())
    for record in plain["tasks"]["animals"]["items"]:
        record["acc_norm"] = not record["acc_norm"]
    plain["tasks"]["animals"]["items"][0]["text_sha256"] = "other"
    files[1].write_text(json.dumps(plain))
    assert main(["compare", *map(str, files)]) == 0
    table = capsys.readouterr().out
    animals = next(line for line in table.splitlines() if "animals" in line)
    assert "acc_norm" in animals
    assert "2 (2 unpaired)" in animals
    assert "McNemar" in animals
    assert any(line.split()[:3] == ["fox", "nll", str(plain["tasks"]["fox"]["n"])] for line in table.splitlines())
    files[1].write_text("{}")
    assert main(["compare", *map(str, files)]) == 2
    assert "second.json: is not a file of caramba eval" in capsys.readouterr().err


def test_cluster_is_the_passage_else_the_context(tmp_path) -> None:
    from caramba.evaluation.local_tasks import _cluster

    passage = "Passage: " + "word " * 60
    first, second = ({"context": f"{passage}\nQuestion: {text}?\nAnswer:", "choices": [" a", " b"]} for text in "xy")
    assert _cluster(first) == _cluster(second)
    assert _cluster({"context": "a dog"}) != _cluster({"context": "a cat"})
    assert _cluster({"context": "a", "cluster": 7}) == "7"
