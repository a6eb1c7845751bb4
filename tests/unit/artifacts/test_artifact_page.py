"""report.html: whole without a network or scripts, every link resolves, every number has its source, text stays text."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from sample_run import without

from caramba.artifacts import collect, tables, write
from caramba.artifacts.page import _METRIC_HEAD, _PHASE_HEAD
from caramba.artifacts.tables import NOTHING, TIMES, list_tables
from caramba.result import Answer, Case, Check, Metric, RunResult, Verdict

NASTY = "</title></style><script>alert(1)</script> \"'&amp; <img src=//x onerror=y> é 50%"
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Elements with attributes and text; refuses one that is closed out of order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.raw, self.open = text, []
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self.open.append(self.elements[-1])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element[2].append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str], str]]:
        return [(attributes, "".join(text)) for name, attributes, text in self.elements if name == tag]

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes, _ in self.elements if "id" in attributes]


def page_of(result: RunResult, run_dir: Path) -> Page:
    write(result, run_dir)
    return Page((run_dir / "artifacts/report.html").read_text())


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page((written / "artifacts/report.html").read_text())


def test_it_opens_from_disk_alone_and_every_link_resolves(page: Page, written: Path) -> None:
    assert len(page.ids) == len(set(page.ids))
    links = [attributes["href"] for attributes, _ in page.all("a")]
    for link in links:
        if link.startswith("#"):
            assert unquote(link[1:]) in page.ids
        else:
            assert (written / "artifacts" / unquote(link)).is_file()
    beside = {path.name for path in (written / "artifacts").iterdir()} - {"report.html"}
    assert {unquote(link) for link in links if not link.startswith("#")} == beside
    assert not {"script", "link", "iframe", "object"} & {name for name, *_ in page.elements}
    assert not re.search(r"https?:|@import|url\(|\bon\w+=", page.raw)


def test_figures_are_inside_and_nothing_else_may_load(page: Page, written: Path) -> None:
    inside = set()
    for attributes, _ in page.all("img"):
        assert attributes["alt"]
        kind, _, data = attributes["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        inside.add(base64.b64decode(data, validate=True))
    assert inside == {path.read_bytes() for path in (written / "artifacts").glob("*.svg")}
    ((_, style),) = page.all("style")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = [attributes["content"] for attributes, _ in page.all("meta") if "http-equiv" in attributes]
    (text,) = policy
    assert text.startswith(f"default-src 'none'; img-src data:; style-src 'sha256-{digest}';")


def test_every_number_has_a_row_with_all_its_digits_and_where_it_comes_from(page: Page, result: RunResult) -> None:
    metrics = collect(result)
    rows = {
        attributes["id"].removeprefix("metric:"): index
        for index, (name, attributes, _) in enumerate(page.elements)
        if name == "tr" and attributes.get("id", "").startswith("metric:")
    }
    assert list(rows) == list(metrics)
    for key, index in rows.items():
        metric = metrics[key]
        cells = ["".join(text) for name, _, text in page.elements[index + 1 : index + 8] if name == "td"]
        assert float(cells[0]) == metric.value
        assert cells[1] == metric.unit
        assert cells[2] == (NOTHING if metric.spread is None else repr(metric.spread))
        assert cells[3:5] == [NOTHING if metric.n is None else str(metric.n), metric.source]
    linked = {attributes["href"] for attributes, _ in page.all("a")}
    assert "#metric%3Alatency.student.tok_s%40prompt%3D1024%2Cgen%3D32%2Cbatch%3D1" in linked


def test_the_tables_are_those_of_the_paper(page: Page, result: RunResult) -> None:
    tables = list_tables(result, collect(result))
    captions = [text for _, text in page.all("caption")]
    texts = [text for tag in ("th", "td") for _, text in page.all(tag)]
    keys = {attributes.get("data-key") for tag in ("th", "td") for attributes, _ in page.all(tag)}
    assert {f"{table.before}{table.name}{table.after}" for table in tables} <= set(captions)
    for table in tables:
        for cell in (cell for row in table.rows for cell in row):
            assert cell.text in texts
            assert cell.key in keys
    assert {"Perplexity ↓", f"1.042{TIMES} ± 0.031", "failed"} <= set(texts)


def test_a_reader_without_sight_finds_the_way(page: Page) -> None:
    assert page.all("html")[0][0] == {"lang": "en"}
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("title")) == 1
    levels = [int(name[1]) for name, *_ in page.elements if re.fullmatch(r"h[1-6]", name)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert len(page.all("caption")) == len(page.all("table"))
    assert all(attributes["scope"] in ("col", "row") for attributes, _ in page.all("th"))
    assert ("#content", "Skip to the content") in [(a["href"], text) for a, text in page.all("a")]
    for attributes, _ in page.all("section"):
        assert attributes["aria-labelledby"] in page.ids


def test_long_records_are_folded_away_under_a_title(page: Page) -> None:
    details = page.all("details")
    assert [text for _, text in page.all("summary")] == ["Environment", "Plan"][: len(details)]
    assert details
    assert all("open" not in attributes for attributes, _ in details)
    assert len(page.all("pre")) == len(details)


def test_text_of_a_run_stays_text(result: RunResult, tmp_path: Path, page: Page) -> None:
    answers = (Answer("teacher", "<b>", True), Answer("student", None, is_correct=False))
    asked = Verdict(NASTY, NASTY, (Check(NASTY, 1.0, 2.0, NASTY),), cases=(Case(NASTY, "choice", "p", "<i>", answers),))
    odd = dataclasses.replace(
        without(result, "latency", NASTY),
        name=NASTY,
        run_id=NASTY,
        git_commit=NASTY,
        labels={"proxy": NASTY},
        environment={NASTY: [NASTY]},
        verdicts=(*result.verdicts, asked),
    )
    metric = Metric("perplexity.<b>&.nll", 1.0, "<i>", None, None, NASTY)
    perplexity, failed = odd.benchmarks[0], next(bench for bench in odd.benchmarks if bench.error)
    perplexity = dataclasses.replace(perplexity, metrics=(*perplexity.metrics, metric))
    found = page_of(dataclasses.replace(odd, benchmarks=(perplexity, failed)), tmp_path)
    plain = {name for name, *_ in page.elements}
    assert {name for name, *_ in found.elements} - plain == {"strong"}, "the bold of a correct answer"
    assert {a for _, attributes, _ in found.elements for a in attributes} <= {
        a for _, attributes, _ in page.elements for a in attributes
    }
    assert found.all("h1") == [({}, NASTY)]
    assert found.all("title")[0][1] == f"{NASTY}: report"
    assert "metric:perplexity.<b>&.nll" in found.ids
    cells = [text for _, text in found.all("td")]
    assert {NASTY, "<b>", "<i>"} <= set(cells)


@pytest.mark.usefixtures("blank_figures")
def test_it_says_what_failed_and_what_is_missing(result: RunResult, tmp_path: Path) -> None:
    broken = without(result, "memory", "RuntimeError: out of memory")
    kept = tuple(bench for bench in broken.benchmarks if bench.type != "latency")
    page = page_of(dataclasses.replace(broken, benchmarks=kept), tmp_path)
    opening = [text for attributes, text in page.all("p") if attributes.get("class") == "failed"]
    assert opening == ["Verification failed: 1 of 5 bounds missed.", "Benchmarks failed: bad_memory."]
    cells = [text for _, text in page.all("td")]
    assert "RuntimeError: out of memory" in cells
    assert "memory_scaling.png" in [text for _, text in page.all("th")]
    nothing = dataclasses.replace(result, benchmarks=(), verdicts=(), transplant=None, phases=())
    bare = page_of(nothing, tmp_path)
    assert [text for _, text in bare.all("h2")] == ["Left out", "Provenance", "Files"]
    assert bare.all("img") == []


def test_the_page_of_documentation_explains_every_column() -> None:
    """docs/evidence.md has each heading of a table of a report, and each name of a row that is compared."""
    text = (Path(__file__).parents[3] / "docs" / "evidence.md").read_text(encoding="utf-8")
    heads = [value for name, value in vars(tables).items() if name.endswith("_HEAD")]
    rows = [words for _, _, words, _, _ in tables._COMPARED]
    listed = {word for head in [*heads, _PHASE_HEAD, _METRIC_HEAD] for word in head} | set(rows)
    # Words that name a thing and no number.
    plain = {
        "Metric",
        "Model",
        "Task",
        "Type",
        "Check",
        "Case",
        "Kind",
        "Stage",
        "Phase",
        "Layer",
        "Weights",
        "Unit",
    }
    plain |= {"Teacher", "Student", "Teacher answers", "Student answers", "Weights or why skipped", "Row"}
    assert len(listed - plain) > 35
    assert [word for word in sorted(listed - plain) if word not in text] == []
