"""Suites of one's own: files and their errors by line, right answers, changes of prompts, the sandbox, the scores."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.integration.export.samples import GQA, loud, make_run, transformer

from caramba.cli import main
from caramba.config.manifest import Manifest
from caramba.config.suite_file import MatchItem, read_suite
from caramba.config.verify import IntGreedyCase
from caramba.data import ByteTokenizer
from caramba.errors import ConfigError
from caramba.evaluation.custom_suite import is_right, normalise, open_suites, pass_at_k, perturb, score_suite
from caramba.evaluation.sandbox import run_python
from caramba.infer import greedy_until

SUITE = """\
benchmark:
  id: mine
  description: every kind
  max_new_tokens: 6
  stop: ["\\n"]
  perturbations: [typos, distractor]
  data:
    - {kind: int_greedy, prompt: "two and two is", answer: 4}
    - {kind: choice_logprob, prompt: "the cat", choices: [" sat", " ran off"], gold: 1}
    - {kind: choice_logprob, id: named, prompt: "the dogs", choices: [" sat", " ran"], answer: " sat"}
    - {kind: exact_match, prompt: "hello there", answer: [a, b]}
    - {kind: normalized_match, prompt: "hello again", answer: x}
    - {kind: code, prompt: "x = 1  #", tests: "assert x == 1"}
    - {kind: code, prompt: "y = 1  #", tests: "assert y == 2"}
    - prompt: "Keep repeating the word 'company'"
"""


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    (tmp_path / "mine.yaml").write_text(SUITE)
    return tmp_path / "mine.yaml"


def test_yaml_and_json_lines_hold_the_same_suite(file: Path, tmp_path: Path) -> None:
    suite = read_suite(file, where="eval", allow_code=True).suite
    assert [item.id for item in suite.data] == ["1", "2", "named", "4", "5", "6", "7", "8"]
    assert [item.kind for item in suite.data][-1] == "text"
    plain = suite.model_dump(mode="json")
    items = plain.pop("data")
    lines = [json.dumps({"benchmark": plain}), "", *(json.dumps(item) for item in items)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lines) + "\n")
    assert read_suite(tmp_path / "mine.jsonl", where="eval", allow_code=True).suite == suite
    (tmp_path / "bare.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "id": 7}\n')
    bare = read_suite(tmp_path / "bare.jsonl", where="eval", allow_code=False).suite
    assert (bare.id, [item.id for item in bare.data]) == ("bare", ["1", "7"])


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("answer: 4", "anser: 4", 8, "unknown key; did you mean 'answer'"),
        ("max_new_tokens", "max_tokens", 4, "unknown key"),
        ('[" sat", " ran off"]', "[]", 9, "at least 2"),
        ("gold: 1", "gold: 2", 9, "no index of its 2 choices"),
        ("answer: 4", "answer: four", 8, "expected a valid integer"),
        ("kind: exact_match", "kind: exact", 11, "unknown type"),
        ("id: named", "id: '1'", 10, "is that of"),
        ("[typos, distractor]", "[typo]", 6, "did you mean 'typos'"),
        ('"assert y == 2"', '""', 14, "at least 1 character"),
        ("- prompt:", "- [1]\n    - prompt:", 15, "got"),
        ("- prompt:", "- answer: x\n      prompt:", 15, "needs the key 'kind'"),
        ("benchmark:", "benchmark: {", None, "is not YAML"),
        ("benchmark:", "suite:", 1, "unknown key"),
    ],
)
def test_a_bad_item_is_named_with_file_and_line(file: Path, old: str, new: str, line: int | None, message: str) -> None:
    assert old in SUITE
    file.write_text(SUITE.replace(old, new, 1))
    with pytest.raises(ConfigError) as error:
        read_suite(file, where="eval", allow_code=True)
    text = str(error.value)
    assert message in text
    assert f"mine.yaml:{line}" in text if line is not None else "mine.yaml:" in text


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "bad.jsonl:1: is not JSON"),
        (['{"prompt": "a"}', "", '"b"'], "bad.jsonl:3: is 'b'"),
        (['{"benchmark": {"data": []}}'], "bad.jsonl:1: benchmark has data"),
        (
            [
                '{"benchmark": {"id": "s"}}',
                '{"kind": "choice_logprob", "prompt": "a", "choices": ["b", "c"], "gold": -1}',
            ],
            "bad.jsonl:2",
        ),
        (['{"kind": "int_greedy", "prompt": "a", "answer": NaN}'], "NaN is no number"),
        ([], "at least 1 item"),
    ],
)
def test_bad_json_lines_are_named(tmp_path: Path, lines: list[str], message: str) -> None:
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as error:
        read_suite(tmp_path / "bad.jsonl", where="eval", allow_code=False)
    assert message in str(error.value)


def test_code_is_refused_unless_it_is_allowed(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml:13: item '6' runs Python .* allow_code is off"):
        read_suite(file, where="eval", allow_code=False)


def test_matches_are_exact_or_normalised() -> None:
    exact = MatchItem(kind="exact_match", id="a", prompt="p", answer=("Paris", "paris"))
    assert is_right(exact, " Paris ")
    assert not is_right(exact, "PARIS")
    loose = MatchItem(kind="normalized_match", id="a", prompt="p", answer="The Eiffel Tower")
    assert is_right(loose, "eiffel  tower.")
    assert not is_right(loose, "an eiffel")
    assert normalise("A cat, the Dog!") == "cat dog"
    number = IntGreedyCase(kind="int_greedy", id="a", prompt="p", answer=-7)
    assert is_right(number, "it is -07, or 3")
    assert not is_right(number, "7")


def test_pass_at_k_equals_the_share_of_draws() -> None:
    assert pass_at_k(5, 0, 3) == 0
    assert pass_at_k(5, 3, 3) == 1
    assert pass_at_k(4, 1, 2) == pytest.approx(1 - 3 / 6)


def test_changes_are_fixed_and_keep_the_words() -> None:
    prompt = "Question: Which animal lives in water, the whale or the horse? Answer:"
    typos = perturb("typos", prompt)
    assert typos == perturb("typos", prompt) != prompt
    assert sorted(typos) == sorted(prompt)
    assert perturb("case", prompt).lower() == prompt.lower()
    assert perturb("case", prompt) != prompt
    assert perturb("spaces", prompt).split() == prompt.split()
    assert perturb("distractor", prompt).endswith(prompt)
    assert perturb("typos", "a b 12") == "a b 12"


@pytest.mark.process
@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import re, math, json\nassert math.comb(4, 2) == 6", ""),
        ("assert False, 'no'", "AssertionError: no"),
        ("def f(:", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("import os; os._exit(0)", "before its last line"),
        ("while True: pass", "before its last line"),
        ("import time; time.sleep(60)", "before its last line"),
        ("x = 'a' * (1 << 30)", "MemoryError"),
        ("open('big', 'w').write('x' * (2 << 20))", "File too large"),
        ("open('own', 'w').write('x')\nassert open('own').read() == 'x'", ""),
    ],
)
def test_sandbox_bounds_a_program(source: str, error: str) -> None:
    found = run_python(source, timeout_s=0.7, memory_mb=512)
    assert found.is_passed == (not error)
    assert error in found.error


@pytest.mark.process
def test_sandbox_has_no_network_and_no_files_of_the_user(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    found = run_python("import os\nassert 'SECRET' not in os.environ", timeout_s=2, memory_mb=512)
    assert found.is_passed
    secret = tmp_path / "secret"
    secret.write_text("x")
    if found.is_network_closed:
        dial = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)"
        assert "unreachable" in run_python(dial, timeout_s=2, memory_mb=512).error
    if found.are_files_closed:
        for source in (f"open({str(secret)!r}).read()", f"import os; os.unlink({str(secret)!r})"):
            assert "Permission denied" in run_python(source, timeout_s=2, memory_mb=512).error
    assert secret.read_text() == "x"


@pytest.mark.process
def test_scores_are_those_of_the_items(file: Path) -> None:
    model, tokenizer = loud(transformer(GQA)).eval(), ByteTokenizer()
    (opened,) = open_suites([str(file)], limit=None, allow_code=True, where="eval")
    found = {result.task: result for result in score_suite(opened, model, tokenizer, max_length=96, batch_size=3)}
    kinds = ("int_greedy", "choice_logprob", "exact_match", "normalized_match")
    expected = {f"mine.{kind}{change}" for kind in kinds for change in ("", "+typos", "+distractor")}
    assert set(found) == expected | {"mine.code", "mine.text"}
    new = greedy_until(model, tokenizer.encode("hello there"), 6, eos_id=tokenizer.eos_id)
    text = tokenizer.decode(new).split("\n")[0]
    (exact,) = found["mine.exact_match"].items
    assert exact["answer"] == text
    assert found["mine.exact_match"].scores["acc"] == (float(text.strip() in ("a", "b")), None)
    choices = found["mine.choice_logprob"]
    assert [item["acc"] for item in choices.items] == [
        (max(item["logprobs"]) == item["logprobs"][gold]) for item, gold in zip(choices.items, (1, 0), strict=True)
    ]
    changed = found["mine.choice_logprob+distractor"]
    drop = [a["acc"] - b["acc"] for a, b in zip(choices.items, changed.items, strict=True)]
    assert changed.scores["acc_drop"][0] == pytest.approx(sum(drop) / 2)
    assert [item["text_sha256"] for item in changed.items] == [item["text_sha256"] for item in choices.items]
    assert changed.items[0]["logprobs"] != choices.items[0]["logprobs"]
    assert found["mine.code"].scores["pass_at_1"] == (0.5, pytest.approx(0.5))
    assert found["mine.code"].items[1]["errors"] == ["AssertionError: "]
    assert set(found["mine.text"].scores) == {"repetition", "distinct_1", "distinct_2", "length"}
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        score_suite(opened, model, tokenizer, max_length=6, batch_size=3)


@pytest.mark.process
def test_pass_at_k_samples_programs(tmp_path: Path) -> None:
    code = {"samples": 4, "k": [1, 4], "temperature": 1.0}
    header = {"benchmark": {"max_new_tokens": 3, "stop": ["\n"], "code": code}}
    item = {"kind": "code", "prompt": "x = 1  #", "tests": "assert x == 1"}
    (tmp_path / "code.jsonl").write_text(f"{json.dumps(header)}\n{json.dumps(item)}\n")
    (opened,) = open_suites([str(tmp_path / "code.jsonl")], limit=None, allow_code=True, where="eval")
    (found,) = score_suite(opened, loud(transformer(GQA)), ByteTokenizer(), max_length=96, batch_size=3)
    assert found.scores["pass_at_1"] == (1.0, None)
    assert len(found.items[0]["errors"]) == 4


def test_eval_runs_a_suite_and_keeps_its_items(tmp_path: Path, capsys) -> None:
    run = make_run(tmp_path, loud(transformer(GQA)), block_size=48)
    items = [
        {"kind": "choice_logprob", "prompt": f"item {n} is", "choices": [" good", " bad"], "gold": n % 2}
        for n in range(8)
    ]
    suite = tmp_path / "taste.jsonl"
    suite.write_text("\n".join(map(json.dumps, items)))
    out = tmp_path / "out.json"
    words = ["eval", str(run), "--tasks", str(suite), "--out", str(out), "--device", "cpu"]
    assert main([*words, "--smallest-difference", "1"]) == 0
    said = capsys.readouterr()
    assert "too few to see any difference" in said.out + said.err
    assert "smallest_difference asks for 1.0" in said.out + said.err
    found = json.loads(out.read_text())
    assert found["suites"]["taste"]["path"] == str(suite)
    scores = found["tasks"]["taste"]
    assert scores["n"] == 8
    hits = [item["acc"] for item in scores["items"]]
    assert scores["scores"]["acc"]["value"] == sum(hits) / 8
    assert scores["scores"]["acc"]["stderr"] == pytest.approx(math.sqrt(sum(hits) / 8 * (1 - sum(hits) / 8) / 7))
    assert main(["compare", str(out), str(out)]) == 0
    assert "taste" in capsys.readouterr().out


def test_mixed_tasks_and_agents_are_refused(file: Path, capsys, tmp_path: Path, monkeypatch) -> None:
    assert main(["eval", "nowhere", "--tasks", f"piqa,{file}"]) == 2
    assert "mixes suites" in capsys.readouterr().err
    words = f"benchmark.benchmarks=[{{id: s, config: {{type: accuracy, tasks: [{file}]}}}}]"
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "model=tiny", "train=pretrain", words]) == 2
    assert "item '6' runs Python" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists(), "before anything is made"
    from caramba.launch.freeze import freeze

    allowed = f"benchmark.benchmarks=[{{id: s, config: {{type: accuracy, allow_code: true, tasks: [{file}]}}}}]"
    manifest = freeze(["model=tiny", "train=pretrain", allowed]).manifest
    with pytest.raises(ValueError, match="may not set allow_code"):
        Manifest.model_validate(manifest.model_dump() | {"origin": "agent"})
