"""caramba generate and chat as a user types them: on a Hugging Face folder, an export and a run."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from caramba.cli import main
from caramba.config.generate import SpeculativeConfig
from caramba.data import ByteTokenizer
from caramba.export.tokenizer import write_tokenizer
from caramba.infer import SpeculativeGenerator
from caramba.infer.arguments import GenerationArguments, open_generator, sampling_config
from tests.integration.commands import SMALL, SMALL_TEACHER, caramba, only_run
from tests.unit.hf.folders import BASE

CONTEXT = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of random weights, sharp enough that its choices do not hang on rounding."""
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**(BASE | {"vocab_size": 257, "max_position_embeddings": CONTEXT}))
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    model.save_pretrained(path)
    write_tokenizer(path, ByteTokenizer(), max_positions=CONTEXT)
    return path


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main(["generate", *words, "--device", "cpu", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_greedy_text_is_that_of_transformers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["def f(x):", "a", "The quick brown fox"]
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    options = ("--temperature", "0", "--max-new-tokens", "24", "--repetition-penalty", "1.2")
    found = generated(capsys, str(folder), *words, *options)
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    for prompt, row in zip(prompts, found["rows"], strict=True):
        ids = torch.tensor([list(prompt.encode())])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            repetition_penalty=1.2,
            eos_token_id=256,
            pad_token_id=256,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = [int(token) for token in out.sequences[0, ids.shape[1] :] if token != 256]
        assert row["tokens"] == tokens
        expected = [float(logits[0].log_softmax(-1)[token]) for logits, token in zip(out.logits, tokens, strict=False)]
        assert row["logprobs"] == pytest.approx(expected, abs=1e-3)


def test_seeds_give_the_same_text_alone_and_in_a_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--temperature", "0.7", "--top-p", "0.9", "--max-new-tokens", "16")
    both = generated(capsys, str(folder), "--prompt", "abc", "--prompt", "z", "--seed", "3", *options)["rows"]
    alone = generated(capsys, str(folder), "--prompt", "z", "--seed", "4", *options)["rows"]
    assert both[1]["tokens"] == alone[0]["tokens"]


@pytest.mark.slow
def test_compiled_steps_give_the_same_text_and_say_what_ran(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (str(folder), "--prompt", "def f(x):", "--prompt", "a", "--max-new-tokens", "16", "--top-k", "20")
    plain = generated(capsys, *words)
    compiled = generated(capsys, *words, "--compiled", "true")
    graph = generated(capsys, *words, "--compiled", "graph")
    for found in (compiled, graph):
        assert [row["tokens"] for row in found["rows"]] == [row["tokens"] for row in plain["rows"]]
    assert [found["stats"]["decode"] for found in (plain, compiled, graph)] == ["eager", "compiled", "eager"]
    assert graph["stats"]["not_compiled"] == "CUDA graphs need a CUDA device, the model is on cpu"


def test_what_cannot_be_done_is_said_with_status_2(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, text in (
        ((), "no prompt; give --prompt TEXT"),
        (("--prompt", "a", "--top-p", "1.5"), "top_p: got 1.5, expected less than or equal to 1"),
        (("--prompt", "a", "--top-k", "x"), "argument --top-k: invalid int value: 'x'"),
        (("--prompt", ""), "prompt 0 is empty"),
        (("",), "generate: unrecognized arguments: '' (an empty word); caramba generate RUN|DIR"),
        (("--prompt", "a" * 90), "prompt 0 of 90 tokens and max_new_tokens=48 exceed the 96 positions"),
        (("--prompt", "a", "--cache-kind", "auto", "--cache-budget-mb", "0.001"), "take at least"),
        (
            ("--prompt", "a", "--max-seq-len", "1000000000000", "--max-new-tokens", "999999999990"),
            "generate: memory ran out",
        ),
        (("--prompt", "a", "--cache-budget-mb", "1"), "cache_budget_mb is of cache_kind=auto"),
        (("--prompt", "a", "--cache-plan-probe", "yes"), "got 'yes', expected true or false"),
        (("--prompt", "a", "--cache-kind", "auto", "--cache-quality-text", "no"), "cache_quality_text=no"),
        (("--prompt", "a", "--compiled", "maybe"), "compiled"),
        (("--prompt", "a", "--stop", ""), "stop[0]: String should have at least 1 character"),
        (("--prompt-file", str(tmp_path / "no")), "No such file"),
        (("--prompt", "a", "--tokenizer", "nowhere"), "there is no tokenizer file"),
    ):
        capsys.readouterr()
        assert main(["generate", str(folder), "--device", "cpu", *words]) == 2
        assert text in capsys.readouterr().err


def test_a_conversation_comes_through_a_pipe(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def chat(lines: str, status: int = 0, *more: str) -> str:
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        capsys.readouterr()
        words = ["chat", str(folder), "--device", "cpu", "--max-new-tokens", "12", "--quiet", *more]
        assert main(words) == status
        return capsys.readouterr().out

    first = chat("hello\n/stats\n/reset\nhello\n\n/stats\n/help\n/quit\nnever read\n")
    assert "1 turns, " in first
    assert "2 turns, " in first
    assert "tok/s" in first
    assert "cache " in first
    assert "/reset      forget the conversation" in first
    assert chat("hello\n").strip() == first.split("1 turns")[0].strip()
    assert chat("x" * 200 + "\n", status=2) == ""
    saved = tmp_path / "talk.safetensors"
    said = chat(f"hello\n/save {saved}\nagain\n")
    assert f"1 turns: {saved}\n" in said
    assert chat("again\n", 0, "--resume", str(saved)) == said[said.index("1 turns: ") :]
    assert chat("again\n", 2, "--resume", str(saved), "--cache-kind", "bf16") == ""


@pytest.mark.slow
def test_a_run_and_its_export_give_the_same_text(tmp_path: Path, cache: Path) -> None:
    words = ("experiment=smoke", "device=cpu", "benchmark=none", "verify=none", *SMALL, *SMALL_TEACHER)
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    run = str(only_run(tmp_path))
    assert caramba(["export", run, "--out", "out"], tmp_path, cache).returncode == 0
    options = ("--prompt", "import os", "--max-new-tokens", "16", "--json", "--device", "cpu")
    rows = []
    for place in (run, "out"):
        done = caramba(["generate", place, *options], tmp_path, cache)
        assert done.returncode == 0, done.stdout + done.stderr
        rows.append(json.loads(done.stdout)["rows"][0])
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert rows[0]["text"] == rows[1]["text"]
    automatic = (*options, "--cache-kind", "auto", "--max-new-tokens", "140", "--max-seq-len", "256")
    first, again = (json.loads(caramba(["generate", run, *automatic], tmp_path, cache).stdout) for _ in "12")
    policy = first["cache_policy"]
    assert policy["text"] == "the held-out split of stdlib"
    assert all(one["quality"]["needle_depths"] for one in policy["candidates"])
    assert [found["cache_policy"]["is_measured_now"] for found in (first, again)] == [True, False]
    assert again["rows"] == first["rows"]
    done = caramba(["generate", "out", *automatic], tmp_path, cache)
    assert json.loads(done.stdout)["cache_policy"]["reason"].startswith("out is no run")
    done = caramba(["chat", run, "--max-new-tokens", "8"], tmp_path, cache, input="hi\n/stats\n")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 turns, " in done.stdout


def test_an_automatic_cache_tells_why(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CARAMBA_HOME", str(tmp_path))
    options = (str(folder), "--prompt", "abc", "--max-new-tokens", "8", "--cache-kind", "auto")
    short = generated(capsys, *options)
    assert short["cache_policy"]["kind"] == short["stats"]["cache_kind"] == "bf16"
    assert "at most 128 tokens" in short["cache_policy"]["reason"]
    assert [one["verdict"] for one in short["cache_policy"]["candidates"]] == ["not measured"] * 4
    assert main(["generate", *options, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "cache_kind=auto chose bf16: a cache of at most 128 tokens" in printed
    assert "cache at 1 x 11 tokens  " in printed, "on no text, as nothing was measured"
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n/stats\n"))
    assert main(["chat", str(folder), "--device", "cpu", "--cache-kind", "auto", "--max-new-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert "cache_kind=auto chose bf16" in printed
    assert "bf16 cache " in printed


def test_the_words_of_speculation_reach_the_generator(folder: Path) -> None:
    values: dict[str, Any] = {"spec_method": "lookup", "spec_k": 3, "spec_disable_below_accept": 0.2}
    values |= {"hysteresis": 0.1, "window": 12, "retry_after": 20, "max_ngram": 3}
    for command in ("generate", "chat"):
        parser = GenerationArguments(command, "")
        given = [word for key, value in values.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        words = parser.parse_args([str(folder), "--device", "cpu", *given])
        words.command = command
        _, generator = open_generator(words, sampling_config(words))
        assert isinstance(generator, SpeculativeGenerator)
        assert generator.speculation == SpeculativeConfig(**values)


def test_speculation_reports_itself_and_keeps_the_text(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (str(folder), "--prompt", "abcabcabcab", "--max-new-tokens", "40", "--temperature", "0.8")
    plain = generated(capsys, *options)["rows"][0]
    found = generated(capsys, *options, "--spec-method", "lookup", "--spec-compare")
    assert found["rows"][0]["tokens"] == plain["tokens"]
    assert found["stats"]["speed_up"] > 0
    assert found["stats"]["drafted"] >= found["stats"]["accepted"]
    drafted = generated(capsys, *options, "--spec-method", "draft", "--draft", str(folder), "--spec-k", "3")
    assert drafted["stats"]["acceptance_rate"] > 0.9
    assert len(drafted["rows"][0]["tokens"]) <= 40
    several = ("--prompt", "b", "--prompt", "xyxyx")
    together = generated(capsys, *options, *several, "--spec-method", "early_exit")
    assert together["stats"]["not_batched"] is None
    assert together["stats"]["speed_up_estimate"] > 0
    alone = generated(capsys, *options, "--spec-method", "early_exit")
    assert together["rows"][0]["tokens"] == alone["rows"][0]["tokens"]
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nabc\n/stats\n"))
    said = ["chat", str(folder), "--device", "cpu", "--max-new-tokens", "2", "--spec-method", "lookup"]
    assert main(said) == 0
    assert "2 turns, 4 tokens at " in (printed := capsys.readouterr().out)
    assert "; last answer: 0 of 0 drafts accepted (0.0%), 1.00 tokens a step" in printed
    for words, text in (
        (("--spec-k", "3"), "name --spec-method lookup"),
        (("--spec-method", "draft"), "needs a smaller model of the same tokenizer: --draft"),
        (("--spec-method", "lookup", "--draft", str(folder)), "or --spec-method draft with --draft"),
        (("--spec-method", "early_exit", "--spec-draft-layers", "9"), "spec_draft_layers=9 of a model of 2"),
        (("--spec-compare",), "--spec-compare times speculation against none"),
        (("--spec-method", "lookup", "--spec-k", "17"), "spec_k: got 17, expected less than or equal to 16"),
        (("--retry-after", "8"), "name --spec-method lookup"),
        (("--spec-method", "lookup", "--window", "0"), "window: got 0, expected greater than 0"),
        (("--spec-method", "lookup", "--hysteresis", "0.95"), "plus hysteresis=0.95 is above 1"),
    ):
        capsys.readouterr()
        assert main(["generate", *options, "--device", "cpu", *words]) == 2
        assert text in capsys.readouterr().err
