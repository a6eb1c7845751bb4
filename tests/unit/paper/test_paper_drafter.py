"""The loop from artifacts to an adopted version, with a scripted model behind real litellm and real pdflatex."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from finished_run import PROXY, write_run
from scripted_paper import ABSTRACT, RESULTS, drafted, section, whole
from tests.needs import need
from tests.paper_servers import LiteratureServer, calls, chat_server, says

from caramba.config.paper import PaperConfig
from caramba.errors import ConfigError
from caramba.paper import PaperDrafter

need("litellm")
pytestmark = pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")

Make = Callable[..., PaperConfig]


def test_every_tool_leads_to_an_adopted_version(
    config: Make, own: Path, literature: LiteratureServer, tmp_path: Path
) -> None:
    (tmp_path / "mine.bib").write_text("@misc{own2020, title={Own work}, author={A. Person}, year={2020}}\n")
    body = (
        RESULTS
        + r" It builds on \citet{arxiv:1706.03762}, who reach \citednumber{arxiv:1706.03762}{28.4} BLEU, on "
        + r"\citep{s2:"
        + "a" * 40
        + r",own2020}. \artifacttable{comparison} \artifactfigure{summary.png}{Overview.} "
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
        calls(("update_section", section("abstract", ABSTRACT)), ("read_tex_file", {})),
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
    assert empty == {"sections": {}, "missing": ["abstract", "results"]}
    assert results[-1]["missing"] == []
    assert (found.version, found.spent.iterations, found.spent.tokens) == (
        1,
        8,
        960,
    )  # with two calls that condense abstracts
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
    assert [key in references for key in ("arxiv:1706.03762", "s2:" + "a" * 40, "own2020")] == [True] * 3
    assert (paper / "figures/summary.png").read_bytes() == (own / "artifacts/summary.png").read_bytes()
    record = json.loads((paper / "versions/001/version.json").read_text())
    assert "bib:own2020" in record["records"]
    assert record["sections"]["results"]["by"] == "agent"
    assert record["proxy"] == PROXY
    roles = [message["role"] for message in record["messages"]]  # the conversation that wrote it
    assert roles[:3] == ["system", "user", "assistant"]
    assert roles.count("tool") == 14
    assert roles[-1] == "assistant"


@pytest.mark.usefixtures("without_latex")
def test_without_a_proxy_nothing_is_marked(config: Make, tmp_path: Path) -> None:
    write_run(tmp_path, labels={})
    with chat_server(whole(), says("done")) as server:
        drafted(config(server.url), tmp_path)
    for name in ("paper.tex", "results.tex"):
        assert r"\emph{proxy}" not in (tmp_path / "paper" / name).read_text()


REFUSED = [
    (
        ("update_section", section("results", "It reaches 52.05.")),
        "'52.05' is a number that no artifact vouches for",
    ),
    (
        ("update_section", section("results", r"As in \cite{smith2020magic}.")),
        "'smith2020magic' is no citation",
    ),
    (("add_citation", {"source_id": "arxiv:2401.99999"}), "is no record that a search returned"),
    (("add_citation", {"source_id": "a2020", "bibtex": "@misc{a2020}"}), "bibtex: unknown key"),
    (("update_section", section("results", r"\input{/etc/passwd}")), r"\input is not a command"),
    (
        ("update_section", section("results", r"\begin{tabular}{l} a & b \\ \end{tabular}")),
        "does not compile",
    ),
    (("update_section", section("results", "\u6ce8\u610f")), "does not compile"),
    (("update_section", section("discussion", "x")), "not among the sections abstract, results"),
    (("update_section", section("conclusions", "x")), "conclusion"),
    (("write_tex_file", {"sections": {}}), "sections"),
    (("write_tex_file", {"sections": {"results": 1}}), "sections.results: got 1, expected a valid string"),
    (("write_tex_file", '{"sections": {"results": "bo'), "not readable as JSON"),
    (("write_tex_file", "[1]"), "expected"),
    (("read_tex_file", {"path": "../manifest.json"}), "path: unknown key"),
    (("read_tex_file", {"path": "/etc/passwd"}), "path: unknown key"),
    (("include_figure", {"name": "../../manifest.json", "caption": "x"}), "is no figure"),
    (("run_shell", {"command": "id"}), "'run_shell' is no tool"),
    (("read_text_file", {}), "did you mean 'read_tex_file'?"),
]


def test_refusals_are_told_to_the_model_and_change_nothing(config: Make, own: Path) -> None:
    with chat_server(whole(), calls(*(call for call, _ in REFUSED)), says("done")) as server:
        assert drafted(config(server.url), own).version == 1
        accepted, *refused = server.results()
    assert accepted["accepted"] == ["abstract", "results"]
    for (call, message), result in zip(REFUSED, refused, strict=True):
        assert message in result["error"], call
    assert RESULTS.splitlines()[0] in (own / "paper/paper.tex").read_text()


def test_a_paper_that_is_not_finished_is_not_adopted(config: Make, own: Path) -> None:
    dangling = RESULTS + r" See Section~\ref{sec:nowhere}."
    with chat_server(
        says("I am done."),
        calls(("update_section", section("abstract", ABSTRACT))),
        says("Done."),
        calls(("update_section", section("results", dangling))),
        says("Done."),
        calls(("update_section", section("results", RESULTS))),
        says("Done."),
    ) as server:
        assert drafted(config(server.url), own).version == 1
        messages = [item["content"] for item in server.requests[-1]["messages"] if item["role"] == "user"]
    assert messages[1:] == [
        "not finished: abstract, results not written",
        "not finished: results not written",
        "not finished: these lead nowhere: reference sec:nowhere",
    ]


@pytest.mark.usefixtures("without_latex")
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
    assert "its SHA-256 is not that of the file" in results[0]["error"]
    assert "no such file" in results[1]["error"]
    assert "its SHA-256 is not that of the file" in results[2]["error"]


def test_a_server_that_is_down_is_named_before_anything_is_drafted(config: Make, own: Path) -> None:
    with pytest.raises(ConfigError, match="no server answers there"):
        PaperDrafter(config()).draft_sync(own)
    assert [item.name for item in (own / "paper").rglob("*.tex")] == []
