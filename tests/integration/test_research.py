"""`caramba research` offline: a stub model on loopback, two real runs of an experiment, real LaTeX, and a replay."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from caramba.data import ByteTokenizer
from caramba.export.write import export_model
from caramba.infer import ModelBundle
from caramba.paper.research.ledger import EVENTS
from caramba.paper.research.verify import verify_ledger
from tests.integration.commands import caramba, only_run, served
from tests.paper_servers import Answer, chat_server
from tests.preloaded import FORKS, forkserver
from tests.unit.serve.served import byte_model

sys.path.append(str(Path(__file__).parents[1] / "unit" / "paper"))

import killed_loop
from finished_run import write_run
from stub_model import NLL, PROPOSAL, StubModel

pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")
needs_latex = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")

BENCHMARK = "{id:perplexity,config:{type:perplexity,block_size:32,batch_size:2,num_batches:2}}"
LAUNCH = (
    *("launch", "model=tiny", "model.embedder.vocab_size=257", "data=stdlib_bytes", "data.max_bytes=100000"),
    *(
        "device=cpu",
        "train=pretrain",
        "train.steps=4",
        "train.batch_size=2",
        "train.block_size=32",
        "verify=none",
    ),
    *("benchmark=smoke", f"benchmark.benchmarks=[{BENCHMARK}]", "paper=report", "paper.enabled=false"),
    *("paper.sections=[abstract,results]", "paper.model=scripted", "paper.api.retries=0"),
)
# Five seeds can decide only if the candidate wins all of them, so the first loss ends it: two runs.
LOOP = (
    *("research", "latest", "--model", "scripted", "--auto-run", "--metric", NLL, "--direction", "less"),
    *("--seeds", "5", "--candidates", "1", "--held-out", "fresh.npy"),
)
HARMFUL = {**PROPOSAL, "patches": [{"key": "lr", "value": 1e-6}]}
BODIES = {"abstract": "A model is trained.", "results": rf"It has \result{{{NLL}}}."}
WRITTEN = (
    "paper.tex",
    "results.tex",
    "paper.pdf",
    "review_iter1.json",
    "review_iter2.json",
    "proposed_lower_lr.yml",
)


@needs_latex
def test_a_loop_ends_with_a_paper_after_a_real_experiment_and_replays(tmp_path: Path, cache: Path) -> None:
    done = caramba(LAUNCH, tmp_path, cache, draws=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "fresh.npy").write_bytes(b"")
    model = StubModel(proposal=HARMFUL, bodies=BODIES)

    def answer(request: dict[str, Any]) -> Answer:
        return Answer(json.dumps(model.send(request)).encode())

    with chat_server(*[answer] * 20) as server:
        done = caramba([*LOOP, "--base-url", server.url], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "research: approved: score 8, no blocking finding" in done.stdout
    run = only_run(tmp_path)
    text = (run / "paper" / "paper.tex").read_text()
    assert r"\result{research.lower_lr.candidate}" in text
    assert r"lower\_lr/seed1" in text
    assert (run / "paper" / "paper.pdf").read_bytes().startswith(b"%PDF")
    verified = caramba(["research", "verify", str(run / "research")], tmp_path, cache)
    assert "2 runs, 1 looks, 1 decisions" in verified.stdout, verified.stderr
    n_paid = len(model.bodies)
    calls = str(run / "research" / "calls.jsonl")
    done = caramba([*LOOP, "--base-url", "http://127.0.0.1:9/v1", "--replay", calls, "--output-dir", "again"],
                   tmp_path, cache)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(model.bodies) == n_paid
    for name in WRITTEN:
        assert (tmp_path / "again" / name).read_bytes() == (run / "paper" / name).read_bytes(), name


@needs_latex
def test_a_loop_with_text_tools_on_caramba_serve_ends_where_the_model_has_no_form(tmp_path: Path, cache: Path) -> None:
    run, weights = tmp_path / "run", tmp_path / "bytes"
    words = ("paper=report", "paper.enabled=false", "paper.sections=[abstract,results]")
    write_run(run, overrides=(*words, "paper.api.retries=0", "paper.budget.max_reply_tokens=16"))
    bundle = ModelBundle(byte_model(), weights, {}, tokenizer=ByteTokenizer(), context=65536)
    export_model(bundle, weights, format="hf", role="student")
    (weights / "chat_template.jinja").write_text("{% for turn in messages %}{{ turn.content }}\n{% endfor %}")
    with served(
        weights,
        tmp_path,
        cache,
        "--max-len",
        "32768",
        "--max-batch",
        "1",
        "--prefix-cache-mb",
        "64",
    ) as (
        _,
        address,
    ):
        server = ["--model", "bytes", "--base-url", f"{address}/v1", "--tools", "text"]
        done = caramba(["research", str(run), *server], tmp_path, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "research: model_unusable: bytes" in done.stdout
    assert "3 answers without a call in JSON" in done.stdout
    assert "3 calls" in done.stdout
    assert not (run / "paper" / "paper.tex").exists()
    assert json.loads((run / "paper" / "research_loop_result.json").read_text())["reason"] == "model_unusable"


def test_kill_9_behind_every_kind_of_event_repeats_no_paid_call_and_no_run(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_run(base)
    (tmp_path / "held_out.npy").write_bytes(b"")
    context: Any = forkserver() if FORKS else multiprocessing.get_context("spawn")

    def loop(name: str, is_killed: bool) -> int:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        process = context.Process(target=killed_loop.run, args=(base, folder, is_killed))
        process.start()
        process.join()
        return process.exitcode

    def lines(name: str, file: str) -> list[str]:
        return [line.replace(name, "NAME") for line in killed_loop.lines_of(tmp_path / name / file)]

    assert loop("loop_one", False) == 0
    n_kills = 0
    while (status := loop("loop_two", True)) == -signal.SIGKILL:
        n_kills += 1
    assert status == 0
    kinds = lines("loop_two", killed_loop.KINDS)
    assert EVENTS | {"call of iter1/draft", "call of iter2/review"} <= set(kinds)
    assert n_kills == len(kinds) == len(set(kinds))
    assert sorted(lines("loop_two", killed_loop.PAID)) == sorted(lines("loop_one", killed_loop.PAID))
    assert sorted(lines("loop_two", killed_loop.RUNS)) == sorted(lines("loop_one", killed_loop.RUNS))
    assert len(lines("loop_one", killed_loop.RUNS)) == 12  # three trials in both arms, two pairs, the held-out pair
    for name in ("loop_one", "loop_two"):
        assert (tmp_path / name / killed_loop.RESULT).read_text() == "approved"
        assert verify_ledger(tmp_path / name / "paper" / "research")["trials"] == 6
