"""`paper=` in a run and `caramba paper` on its artifacts, against a scripted model on loopback."""

from __future__ import annotations

import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.integration import commands
from tests.integration.commands import SMALL, SMALL_TEACHER, TIMEOUT_S, only_run, started
from tests.needs import need
from tests.paper_servers import Answer, calls, chat_server, says

need("litellm")
pytestmark = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")

caramba = partial(commands.caramba, draws=True)  # a paper shows its run's figures
RESULTS = (
    r"The student reaches \result{perplexity.student.perplexity} where its teacher has "
    r"\result{perplexity.teacher.perplexity}, which is \derived{ratio}{perplexity.student.perplexity}"
    r"{perplexity.teacher.perplexity}, after \setting{phases.pretrain.steps} steps. \artifacttable{comparison} "
    r"\artifactfigure{summary.png}{What was measured.}"
)
PAPER = calls(("write_tex_file", {"sections": {"abstract": "A smoke test.", "results": RESULTS}}))
# Without further attempts, so that a resume finds at once that the server of the launch is gone.
SECTIONS = (
    "paper=report",
    "paper.sections=[abstract,results]",
    "paper.model=scripted",
    "paper.api.retries=0",
)


@pytest.fixture(scope="module", name="drafted")
def _drafted(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A real run that ends with a draft; its folder."""
    folder = tmp_path_factory.mktemp("paper")
    with chat_server(calls(("list_artifacts", {})), PAPER, says("done")) as server:
        words = ["launch", "experiment=smoke", "device=cpu", *SMALL, *SMALL_TEACHER, *SECTIONS]
        done = caramba([*words, f"paper.api.base_url={server.url}", "paper.title=A draft"], folder, cache, draws=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "failures" in server.results()[0]
    assert "paper: " in done.stdout
    return folder


def test_a_run_ends_with_a_paper_whose_numbers_are_its_own(drafted: Path) -> None:
    run = only_run(drafted)
    assert (run / "paper/paper.pdf").read_bytes().startswith(b"%PDF")
    numbers = (run / "paper/results.tex").read_text()
    metrics = json.loads((run / "artifacts/report.json").read_text())["metrics"]
    for key in ("perplexity.student.perplexity", "perplexity.teacher.perplexity"):
        assert f"% {key} = {metrics[key]['value']!r}" in numbers
    student, teacher = (line for line in numbers.splitlines() if line.startswith(r"\caramba@define{result}"))
    assert "proxy" in teacher  # it was trained in this run
    assert "proxy" not in student
    assert r"\caramba@define{setting}{phases.pretrain.steps}{3}" in numbers
    assert r"\title{A draft" in (run / "paper/paper.tex").read_text()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (adopted,) = [event for event in events if event["event"] == "paper_adopted"]
    assert (adopted["version"], adopted["iterations"]) == (1, 3)


def test_resuming_a_drafted_run_asks_nothing(drafted: Path, cache: Path) -> None:
    done = caramba(["resume", "latest"], drafted, cache)
    assert done.returncode == 0, done.stderr
    assert "paper: version 1 is of these artifacts" in done.stdout


def test_the_command_updates_a_paper(drafted: Path, cache: Path) -> None:
    refused = caramba(["paper", "latest"], drafted, cache)
    assert refused.returncode == 2
    assert "holds version 1 of a paper; --update resumes it" in refused.stderr

    shorten = calls(("update_section", {"section": "abstract", "body": "Shorter."}))
    with chat_server(calls(("read_tex_file", {})), shorten, says("done")) as server:
        done = caramba(
            ["paper", "latest", "--update", "--base-url", server.url, "--max-iterations", "5"], drafted, cache
        )
    assert done.returncode == 0, done.stderr
    assert "version 2: 3 requests, 360 tokens" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("paper/paper.pdf")
    assert "Shorter." in (only_run(drafted) / "paper/paper.tex").read_text()


def test_another_folder_with_options_and_a_file_of_keys(drafted: Path, cache: Path) -> None:
    (drafted / "keys.yaml").write_text("paper:\n  model: scripted\n  sections: [abstract]\n")
    written = calls(("update_section", {"section": "abstract", "body": "Short."}))
    with chat_server(written, says("done")) as server:
        words = ["paper", "latest", "--output-dir", "mine", "--config", "keys.yaml", "--base-url", server.url]
        done = caramba([*words, "--title", "Mine", "--author", "A", "--author", "B", "--quiet"], drafted, cache)
        assert server.requests[0]["model"] == "scripted"
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"paper: {drafted}/mine/paper.tex", f"pdf: {drafted}/mine/paper.pdf"]
    text = (drafted / "mine/paper.tex").read_text()
    assert r"\title{Mine" in text
    assert r"\author{A \and B}" in text


def test_a_killed_draft_goes_on(drafted: Path, cache: Path) -> None:
    pids: list[int] = []

    def kill(request: dict[str, Any]) -> Answer:
        os.kill(pids[0], signal.SIGKILL)
        return says("too late")

    written = calls(("update_section", {"section": "abstract", "body": "Before the kill."}))
    results = calls(("update_section", {"section": "results", "body": RESULTS}))
    with chat_server(written, kill, results, says("done")) as server:
        words = ["paper", "latest", "--output-dir", "killed", "--base-url", server.url]
        with started(words, drafted, cache) as process:
            pids.append(process.pid)
            assert process.wait(TIMEOUT_S) == -signal.SIGKILL
        assert not (drafted / "killed/paper.tex").exists()
        again = caramba([*words, "--update"], drafted, cache)
        assert again.returncode == 0, again.stderr
        assert len(server.requests) == 4
        roles = [message["role"] for message in server.requests[2]["messages"]]
        assert roles == ["system", "user", "assistant", "tool"]
    assert "Before the kill." in (drafted / "killed/paper.tex").read_text()
    spent = json.loads((drafted / "killed/versions/001/version.json").read_text())["spent"]
    assert spent["reply_tokens"] > 8192  # the request that was cut off counts in full


MISTAKES = [
    (["paper"], "expected a run (a directory, runs/NAME, or latest)"),
    (["paper", "nosuch"], "nosuch: no run there"),
    (["paper", "latest", "--updat"], "unrecognized arguments: --updat"),
    (["paper", "latest", "--max-iterations", "x"], "argument --max-iterations: invalid int value: 'x'"),
    (["paper", "latest", "--max-iterations", "0"], "budget.max_iterations: got 0, expected greater than 0"),
    (["paper", "latest", "--group", "nosuch"], "'nosuch' is no group of this run; --group NAME, of "),
    (
        ["paper", "latest", "--config", "nosuch.yaml"],
        "--config nosuch.yaml: cannot be read (No such file or directory); give a YAML file",
    ),
    (["paper", "latest", "--base-url", "ftp://x"], "no http(s) address"),
    (
        ["paper", "latest", "--api-key-env", "NO_SUCH_KEY"],
        "paper.api.key_env=NO_SUCH_KEY: no such variable is set",
    ),
    (["paper", "latest", "--output-dir", "runs"], "no version of a paper by caramba"),
    (["paper", "latest", "--bib", "no.bib", "--output-dir", "p2"], "no.bib: cannot read the bibliography"),
    (["review", "latest", "--paper-dir", "nowhere"], "no paper to review"),
    (["research", "verify", "nowhere"], "no research.jsonl"),
]


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=lambda item: " ".join(item) if isinstance(item, list) else ""
)
def test_mistakes_are_clear_errors(words: list[str], message: str, drafted: Path, cache: Path) -> None:
    done = caramba(words, drafted, cache)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


LACKING = [
    (["paper.api.key_env=NO_SUCH_KEY"], "paper.api.key_env=NO_SUCH_KEY: no such variable is set"),
    (["paper.model=gpt-4o"], "paper.model=gpt-4o: the environment lacks OPENAI_API_KEY"),
    (["paper.model=nonsense"], "paper.model=nonsense: litellm knows no provider for it"),
    (
        ["paper.api.base_url=http://127.0.0.1:9/v1", "paper.budget.max_cost_usd=1"],
        "paper.budget.max_cost_usd=1: what gpt-4o costs is not known",
    ),
    (
        ["paper.api.base_url=http://127.0.0.1:9/v1", "paper.citations.bibliography=no.bib"],
        "no.bib: cannot read the bibliography",
    ),
]


@pytest.mark.parametrize(("keys", "message"), LACKING, ids=lambda item: item[-1] if isinstance(item, list) else "")
def test_what_a_paper_lacks_is_said_before_the_run_begins(
    keys: list[str], message: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    words = ["launch", "experiment=smoke", *SMALL, *SMALL_TEACHER, "paper=draft", *keys]
    done = caramba(words, tmp_path, cache)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_paper_of_ones_own_is_left_alone(drafted: Path, cache: Path) -> None:
    own = drafted / "own"
    own.mkdir()
    (own / "paper.tex").write_text("mine")
    done = caramba(["paper", "latest", "--output-dir", "own"], drafted, cache)
    assert done.returncode == 2
    assert "no version of a paper by caramba in versions/" in done.stderr
    assert {item.name: item.read_text() for item in own.iterdir()} == {"paper.tex": "mine"}


def test_a_draft_that_fails_leaves_a_finished_run(drafted: Path, tmp_path: Path, cache: Path) -> None:
    """The server that the manifest names is gone by the time of the resume."""
    folder = shutil.copytree(drafted, tmp_path / "copy")
    run = only_run(folder)
    shutil.rmtree(run / "paper")
    done = caramba(["resume", str(run)], folder, cache, draws=False)
    assert done.returncode == 1
    assert "no server answers there" in done.stderr
    assert f"caramba paper {run} --update" in done.stderr
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    assert (run / "artifacts/report.json").is_file()


def test_a_folder_that_is_no_papers_leaves_a_finished_run(drafted: Path, tmp_path: Path, cache: Path) -> None:
    folder = shutil.copytree(drafted, tmp_path / "copy")
    run = only_run(folder)
    shutil.rmtree(run / "paper")
    (run / "paper").mkdir()
    (run / "paper/thesis.tex").write_text("mine")
    done = caramba(["resume", str(run)], folder, cache, draws=False)
    assert done.returncode == 1
    assert "no version of a paper by caramba in versions/" in done.stderr
    assert "The run is finished and its artifacts are written" in done.stderr
