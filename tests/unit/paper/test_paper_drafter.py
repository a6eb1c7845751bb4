"""The loop from artifacts to an adopted version, with a scripted model behind real litellm and real pdflatex."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from finished_run import PROXY, write_run
from tests.paper_servers import Answer, LiteratureServer, calls, chat_server, fails, says

from caramba.config.paper import PaperConfig
from caramba.errors import AgentError, BudgetExceeded, ConfigError
from caramba.paper import PaperDrafter
from caramba.paper import drafter as module
from caramba.paper.draft import Section

pytest.importorskip("litellm", reason="the extra `paper` is not installed")
pytestmark = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")

Make = Callable[..., PaperConfig]
ABSTRACT = "We shrink the cache of a teacher."
RESULTS = r"""The student reaches \result{perplexity.student.perplexity}, its teacher
\result{perplexity.teacher.perplexity}: \derived{ratio}{perplexity.student.perplexity}{perplexity.teacher.perplexity}."""


def section(name: str, body: str) -> dict[str, str]:
    return {"section": name, "body": body}


def whole(results: str = RESULTS) -> Answer:
    return calls(
        ("write_tex_file", {"sections": [section("abstract", ABSTRACT), section("results", results)]})
    )


@pytest.fixture(name="own")
def _own(run: Path, tmp_path: Path) -> Path:
    """A finished run to write into."""
    return shutil.copytree(run, tmp_path / "run")


def drafted(config: PaperConfig, run: Path, **named: Any):
    return PaperDrafter(config, sleep=lambda seconds: None).draft_sync(run, **named)


def transcript(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "paper/transcript.jsonl").read_text().splitlines()]


def test_every_tool_leads_to_an_adopted_version(
    config: Make, own: Path, literature: LiteratureServer, tmp_path: Path
) -> None:
    (tmp_path / "mine.bib").write_text("@misc{own2020, title={Own work}, author={A. Person}, year={2020}}\n")
    body = (
        RESULTS
        + r" It builds on \citet{vaswani2017attention}, who reach \citednumber{vaswani2017attention}{28.4} BLEU, on "
        + r"\citep{ainslie2023grouped,own2020}. \artifacttable{comparison} \artifactfigure{summary.png}{Overview.} "
        + r"See Table~\ref{tab:caramba-comparison}, Figure~\ref{fig:summary.png} and Section~\ref{sec:results}; the "
        + r"seed is \setting{seed}."
    )
    with chat_server(
        calls(
            ("get_paper_template", {}),
            ("get_experiment_manifest", {"prefix": "seed"}),
            ("get_experiment_results", {"prefix": "perplexity.teacher.perplexity"}),
            ("list_artifacts", {}),
            ("read_tex_file", {}),
        ),
        calls(("search_arxiv", {"query": "attention"}), ("search_semantic_scholar", {"query": "grouped"})),
        calls(
            ("add_citation", {"source_id": "arxiv:1706.03762"}),
            ("add_citation", {"source_id": "s2:" + "a" * 40}),
            ("add_citation", {"source_id": "bib:own2020"}),
            ("include_figure", {"name": "summary.png", "caption": "Overview."}),
        ),
        calls(("update_section", {"section": "results", "body": body})),
        calls(("update_section", section("abstract", ABSTRACT)), ("read_tex_file", {"path": "paper.tex"})),
        says("The paper is complete."),
    ) as server:
        found = drafted(
            config(
                server.url,
                title="Caches & bytes",
                authors=["A. Person"],
                citations={"bibliography": str(tmp_path / "mine.bib")},
            ),
            own,
        )
        results = server.results()
    assert not [result for result in results if "error" in result]
    template, manifest, measured, artifacts, empty = results[:5]
    assert template["sections"] == {"abstract": "Abstract", "results": "Results"}
    assert manifest["settings"] == {"seed": "1337"}
    teacher = measured["results"]["perplexity.teacher.perplexity"]
    assert (teacher["n"], teacher["is_proxy"], measured["proxy_teacher"]) == (256, True, PROXY)
    assert artifacts["bibliography"] == [{"id": "bib:own2020", "title": "Own work", "year": "2020"}]
    assert empty == {"sections": [], "missing": ["abstract", "results"]}
    assert results[-1]["missing"] == []
    assert (found.version, found.spent.iterations, found.spent.tokens) == (1, 6, 720)
    paper = own / "paper"
    assert found.pdf.read_bytes().startswith(b"%PDF")
    text = (paper / "paper.tex").read_text()
    assert r"\title{Caches \& bytes" in text
    assert "Numbers marked" in text
    assert PROXY in text
    numbers = (paper / "results.tex").read_text()
    assert r"{perplexity.teacher.perplexity}{9.984\,$\pm$\,0.2097\textsuperscript{\emph{proxy}}}" in numbers
    assert r"{perplexity.student.perplexity}{10.40\,$\pm$\,0.2184}" in numbers
    assert r"{1.042\textsuperscript{\emph{proxy}}}" in numbers  # what compares with a proxy carries it too
    references = (paper / "references.bib").read_text()
    assert [key in references for key in ("vaswani2017attention", "ainslie2023grouped", "own2020")] == [
        True
    ] * 3
    assert (paper / "figures/summary.png").read_bytes() == (own / "artifacts/summary.png").read_bytes()
    record = json.loads((paper / "versions/001/version.json").read_text())
    assert record["citations"]["own2020"] == "bib:own2020"
    assert record["sections"]["results"]["by"] == "agent"
    assert record["proxy"] == PROXY
    events = [event["event"] for event in transcript(own)]
    assert events[:3] == ["begun", "request", "attempt"]
    assert events.count("tool") == 14
    assert events[-1] == "adopted"


def test_without_a_proxy_nothing_is_marked(config: Make, tmp_path: Path) -> None:
    write_run(tmp_path, labels={})
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), tmp_path)
    for name in ("paper.tex", "results.tex"):
        assert r"\emph{proxy}" not in (tmp_path / "paper" / name).read_text()


BASE = {"base_hash": Section(RESULTS).hash}
REFUSED = [
    (
        ("update_section", {**section("results", "It reaches 52.05."), **BASE}),
        "'52.05' is a number that no artifact vouches for",
    ),
    (
        ("update_section", {**section("results", r"As in \cite{smith2020magic}."), **BASE}),
        "'smith2020magic' is no citation",
    ),
    (("add_citation", {"source_id": "arxiv:2401.99999"}), "is no record that a search returned"),
    (("add_citation", {"source_id": "a2020", "bibtex": "@misc{a2020}"}), "bibtex: unknown key"),
    (("update_section", {**section("results", r"\input{/etc/passwd}"), **BASE}), r"\input is not a command"),
    (
        ("update_section", {**section("results", r"\begin{tabular}{l} a & b \\ \end{tabular}"), **BASE}),
        "does not compile",
    ),
    (("update_section", {**section("results", "\u6ce8\u610f"), **BASE}), "does not compile"),
    (("update_section", section("discussion", "x")), "not among the sections abstract, results"),
    (("update_section", section("conclusions", "x")), "conclusion"),
    (("update_section", {**section("results", "x"), "base_hash": "123"}), "is not that of the section"),
    (("write_tex_file", {"sections": [section("results", "a"), section("results", "b")]}), "given twice"),
    (("write_tex_file", {"sections": []}), "sections"),
    (("write_tex_file", '{"sections": [{"section": "results", "bo'), "no JSON"),
    (("write_tex_file", "[1]"), "expected an object"),
    (("read_tex_file", {"path": "../manifest.json"}), "leads out of the paper's folder"),
    (("read_tex_file", {"path": "/etc/passwd"}), "leads out of the paper's folder"),
    (("read_tex_file", {"path": "draft.json"}), "no .tex or .bib file"),
    (("include_figure", {"name": "../../manifest.json", "caption": "x"}), "is no figure"),
    (("include_figure", {"name": "summary.png", "caption": "It is 5.3 better"}), "'5.3' is a number"),
    (("run_shell", {"command": "id"}), "there is no tool 'run_shell'"),
    (("read_text_file", {}), "did you mean 'read_tex_file'?"),
]


def test_refusals_are_told_to_the_model_and_change_nothing(config: Make, own: Path) -> None:
    with chat_server(whole(), calls(*(call for call, _ in REFUSED)), says("done")) as server:
        assert drafted(config(server.url), own).version == 1
        accepted, *refused = server.results()
    assert set(accepted["accepted"]) == {"abstract", "results"}
    for (call, message), result in zip(REFUSED, refused, strict=True):
        assert message in result["error"], call
    assert RESULTS.splitlines()[0] in (own / "paper/paper.tex").read_text()


def test_a_paper_that_is_not_finished_is_not_adopted(config: Make, own: Path) -> None:
    dangling = RESULTS + r" See \ref{sec:nowhere}."
    with chat_server(
        says("I am done."),
        calls(("update_section", section("abstract", ABSTRACT))),
        says("Done."),
        calls(("update_section", section("results", dangling))),
        says("Done."),
        lambda request: calls(
            ("update_section", {**section("results", RESULTS), "base_hash": told(request)})
        ),
        says("Done."),
    ) as server:
        assert drafted(config(server.url), own).version == 1
        messages = [item["content"] for item in server.requests[-1]["messages"] if item["role"] == "user"]
    assert messages[1:] == [
        "not finished: abstract, results not written",
        "not finished: results not written",
        "not finished: these lead nowhere: reference sec:nowhere",
    ]


def told(request: dict[str, Any]) -> str:
    """The hash that the last accepted write told the model."""
    answers = [json.loads(item["content"]) for item in request["messages"] if item["role"] == "tool"]
    return next(iter(answers[-1]["accepted"].values()))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"max_iterations": 2}, "max_iterations=2 requests and is not finished"),
        ({"max_tokens": 12000, "max_reply_tokens": 100}, "max_tokens=12,000 are spent"),
        (
            {
                "max_cost_usd": 0.011,
                "usd_per_million_prompt": 1.0,
                "usd_per_million_reply": 1.0,
                "max_reply_tokens": 100,
            },
            "max_cost_usd=0.011 are spent",
        ),
    ],
)
def test_a_spent_budget_keeps_the_draft(
    budget: dict[str, Any], message: str, config: Make, own: Path
) -> None:
    look = calls(("get_experiment_results", {}))
    with chat_server(calls(("update_section", section("abstract", ABSTRACT))), *[look] * 40) as server:
        with pytest.raises(BudgetExceeded, match=message):
            drafted(config(server.url, budget=budget), own)
        n_before = len(server.requests)
        with pytest.raises(BudgetExceeded, match=message):  # going on does not begin a budget anew
            drafted(config(server.url, budget=budget), own, update=True)
        assert len(server.requests) == n_before
    assert not (own / "paper/paper.tex").exists()
    with chat_server(calls(("update_section", section("results", RESULTS))), says("done")) as server:
        found = drafted(config(server.url), own, update=True)
        assert server.requests[0]["messages"][2]["tool_calls"][0]["function"]["name"] == "update_section"
    assert found.spent.iterations == n_before + 2
    assert ABSTRACT in (own / "paper/paper.tex").read_text()


@pytest.mark.parametrize(
    "failure", [fails(401), fails(400), fails(500), Answer(b"<html>")], ids=lambda item: str(item.status)
)
def test_a_model_that_fails_changes_no_version(failure: Answer, config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    before = {
        file: file.read_bytes()
        for file in (own / "paper").rglob("*")
        if file.suffix in (".tex", ".pdf", ".bib")
    }
    with (
        chat_server(calls(("get_paper_template", {})), *[failure] * 9) as server,
        pytest.raises((AgentError, ConfigError)),
    ):
        drafted(config(server.url, api={"max_wait_s": 0.01}), own, update=True)
    after = {
        file: file.read_bytes()
        for file in (own / "paper").rglob("*")
        if file.suffix in (".tex", ".pdf", ".bib")
    }
    assert after == before
    with chat_server(says("Nothing to change.")) as server:
        assert drafted(config(server.url), own, update=True).version == 1
        assert len(server.requests[0]["messages"]) == 4  # the conversation went on where it broke off


def test_an_update_goes_on_from_the_last_version(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
        with pytest.raises(
            ConfigError, match=r"holds version 1 of a paper; --update goes on from it, --output-dir"
        ):
            drafted(config(server.url), own)

    def improve(request: dict[str, Any]) -> Answer:
        sections = json.loads(request["messages"][-1]["content"])["sections"]
        assert [item["section"] for item in sections] == ["abstract", "results"]
        return calls(
            ("update_section", {**section("abstract", "We do better."), "base_hash": sections[0]["hash"]})
        )

    with chat_server(calls(("read_tex_file", {})), improve, says("done")) as server:
        found = drafted(config(server.url), own, update=True)
    assert (found.version, found.spent.iterations) == (2, 3)  # a new draft has a budget of its own
    text = (own / "paper/paper.tex").read_text()
    assert "We do better." in text
    assert RESULTS in text
    assert ABSTRACT in (own / "paper/versions/001/paper.tex").read_text()


def test_what_a_person_edited_is_kept(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    paper = own / "paper/paper.tex"
    paper.write_text(paper.read_text().replace(ABSTRACT, "My own words, with 42 numbers and \\emph{care}."))
    with chat_server(
        whole(),  # would overwrite what the person wrote
        calls(("update_section", {**section("results", RESULTS + " It is small."), "base_hash": "?"})),
        calls(("read_tex_file", {})),
        lambda request: calls(
            (
                "update_section",
                {**section("results", RESULTS + " It is small."), "base_hash": hash_of(request, "results")},
            )
        ),
        says("done"),
    ) as server:
        assert drafted(config(server.url), own, update=True).version == 2
        refused, stale, read, accepted = server.results()
    assert "abstract: edited by a person since" in refused["error"]
    assert "is not that of the section" in stale["error"]
    assert [item["by"] for item in read["sections"]] == ["human", "agent"]
    assert "accepted" in accepted
    text = paper.read_text()
    assert "My own words, with 42 numbers and" in text
    assert "It is small." in text
    record = json.loads((own / "paper/versions/002/version.json").read_text())
    assert {name: item["by"] for name, item in record["sections"].items()} == {
        "abstract": "human",
        "results": "agent",
    }


def hash_of(request: dict[str, Any], name: str) -> str:
    sections = json.loads(request["messages"][-1]["content"])["sections"]
    return next(item["hash"] for item in sections if item["section"] == name)


def test_edits_that_cannot_be_kept_stop_before_anything_is_sent(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    paper = own / "paper/paper.tex"
    original = paper.read_text()
    for changed, message in (
        (
            original.replace(r"\maketitle", r"\maketitle \thispagestyle{empty}"),
            "text outside of the sections was changed",
        ),
        (original.replace("% caramba:end abstract\n", ""), "the marks of section abstract are not whole"),
        ("nothing of it", "the marks of section any are not whole"),
    ):
        paper.write_text(changed)
        with chat_server() as server:
            with pytest.raises(ConfigError, match=message):
                drafted(config(server.url), own, update=True)
            assert server.requests == []
        assert paper.read_text() == changed
    paper.write_text(original)
    with chat_server() as server, pytest.raises(ConfigError, match=r"paper\.sections leaves out results"):
        drafted(config(server.url, sections=["abstract"]), own, update=True)


def test_other_artifacts_are_checked_anew(config: Make, own: Path) -> None:
    with chat_server(
        whole(r"It has \result{latency.student.ttft_ms@prompt=64,gen=32,batch=1}."), says("done")
    ) as server:
        drafted(config(server.url), own)
    report = json.loads((own / "artifacts/report.json").read_text())
    del report["metrics"]["latency.student.ttft_ms@prompt=64,gen=32,batch=1"]
    (own / "artifacts/report.json").write_text(json.dumps(report))
    with chat_server(says("fine as it is"), calls(("read_tex_file", {})), lambda request: calls(
        ("update_section", {**section("results", RESULTS), "base_hash": hash_of(request, "results")})
    ), says("done")) as server:  # fmt: skip
        assert drafted(config(server.url), own, update=True).version == 2
        told_first = server.requests[0]["messages"][1]["content"]
        told_then = server.requests[1]["messages"][-1]["content"]
    assert "These no longer hold" in told_first
    assert "is no key of report.json" in told_then


class Killed(BaseException):
    """Stands for a kill: no handler of errors takes it."""


@pytest.mark.parametrize("moment", range(1, 9))
def test_a_kill_between_any_two_steps_is_made_good(
    moment: int, config: Make, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft is saved after each of its eight steps; it stops behind one and goes on as a new process would."""
    left, save = moment, module._Session._save

    def counted(self: Any) -> None:
        nonlocal left
        save(self)
        left -= 1
        if left == 0:
            raise Killed

    first = calls(("get_paper_template", {}), ("update_section", section("abstract", ABSTRACT)))
    with chat_server(first, says("done")) as server:
        plain = config(server.url, sections=["abstract"])
        with monkeypatch.context() as patch:
            patch.setattr(module._Session, "_save", counted)
            with pytest.raises(Killed):
                drafted(plain, own)
        if moment < 8:  # the last step is behind the adopted version
            assert drafted(plain, own, update=True).version == 1
        assert len(server.requests) == 2  # a reply that was saved is never paid for again
    assert json.loads((own / "paper/draft.json").read_text())["is_open"] is False
    assert ABSTRACT in (own / "paper/paper.tex").read_text()


def test_figures_that_were_changed_are_refused(config: Make, own: Path, tmp_path: Path) -> None:
    figure = own / "artifacts/summary.png"
    figure.write_bytes(b"\x89PNG other")
    secret = tmp_path / "secret.png"
    secret.write_bytes((own / "artifacts/memory_scaling.png").read_bytes())
    (own / "artifacts/memory_scaling.png").unlink()
    (own / "artifacts/memory_scaling.png").symlink_to(secret)
    with chat_server(
        calls(
            ("include_figure", {"name": "summary.png", "caption": "x"}),
            ("include_figure", {"name": "memory_scaling.png", "caption": "x"}),
            ("update_section", section("results", r"\artifactfigure{summary.png}{x}")),
        ),
        whole(),
        says("done"),
    ) as server:
        drafted(config(server.url), own)
        results = server.results()
    assert "its SHA-256 is not that of report.json" in results[0]["error"]
    assert "no such file" in results[1]["error"]
    assert "its SHA-256 is not that of report.json" in results[2]["error"]


def test_searches_that_fail_are_told_and_citations_off_have_none(
    config: Make, own: Path, literature: LiteratureServer
) -> None:
    literature.atom = fails(429)
    with chat_server(calls(("search_arxiv", {"query": "x"})), whole(), says("done")) as server:
        drafted(config(server.url), own)
        assert "HTTP 429 (too many requests)" in server.results()[0]["error"]
    with chat_server(calls(("search_arxiv", {"query": "x"})), says("done")) as server:
        drafted(config(server.url, citations={"enabled": False}), own, update=True)
        names = [tool["function"]["name"] for tool in server.requests[0]["tools"]]
        assert "there is no tool 'search_arxiv'" in server.results()[0]["error"]
    assert not [name for name in names if name.startswith("search")]


def test_citations_are_no_more_than_allowed(config: Make, own: Path, literature: LiteratureServer) -> None:
    with chat_server(
        calls(("search_arxiv", {"query": "x"})),
        calls(
            ("add_citation", {"source_id": "arxiv:1706.03762"}),
            ("add_citation", {"source_id": "arxiv:2405.04434"}),
        ),
        calls(("add_citation", {"source_id": "arxiv:1706.03762"})),
        whole(),
        says("done"),
    ) as server:
        drafted(config(server.url, citations={"max_citations": 1}), own)
        _, first, second, again, _ = server.results()
    assert first["key"] == again["key"] == "vaswani2017attention"
    assert "as many as max_citations allows" in second["error"]


def test_a_version_holds_all_that_an_update_needs(
    config: Make, own: Path, literature: LiteratureServer
) -> None:
    with chat_server(
        calls(("search_arxiv", {"query": "x"})),
        calls(("add_citation", {"source_id": "arxiv:1706.03762"})),
        whole(RESULTS + r" As in \citep{vaswani2017attention}."),
        says("done"),
    ) as server:
        drafted(config(server.url), own)
    (own / "paper/draft.json").unlink()
    with chat_server(says("fine")) as server:
        assert drafted(config(server.url), own, update=True).version == 1
    assert "vaswani2017attention" in (own / "paper/references.bib").read_text()


def test_old_versions_go_as_configured(config: Make, own: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), own)
    for number in (2, 3):
        with chat_server(whole(RESULTS + " More." * number), says("done")) as server:
            assert drafted(config(server.url, max_versions=2), own, update=True).version == number
    assert sorted(item.name for item in (own / "paper/versions").iterdir()) == ["002", "003"]


def test_runs_that_cannot_be_drafted_from(config: Make, own: Path, tmp_path: Path) -> None:
    with chat_server() as server:
        (own / "artifacts/report.json").rename(tmp_path / "report.json")
        with pytest.raises(
            ConfigError, match=r"no artifacts/report\.json, which a run writes at its end; finish it with"
        ):
            drafted(config(server.url), own)
        (own / "artifacts/report.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"report\.json: not a report of this version"):
            drafted(config(server.url), own)
        assert server.requests == []


def test_two_drafts_of_one_paper_are_kept_apart(config: Make, own: Path) -> None:
    def second(request: dict[str, Any]) -> Answer:
        with pytest.raises(ConfigError, match="is running this draft"):
            drafted(config(server.url), own, update=True)
        return whole()

    with chat_server(second, says("done")) as server:
        assert drafted(config(server.url), own).version == 1


def test_the_async_form_and_another_folder(config: Make, own: Path, tmp_path: Path) -> None:
    with chat_server(whole(), says("done")) as server:
        drafter = PaperDrafter(config(server.url), tmp_path / "elsewhere")
        found = asyncio.run(drafter.draft(own))
    assert found.paper == tmp_path / "elsewhere/paper.tex"
    assert found.paper.is_file()
    assert not (own / "paper").exists()
