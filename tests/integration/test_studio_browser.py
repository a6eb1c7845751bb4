"""The studio and the report in Chromium: nothing overlaps or is cut at both widths, and every view works.

`CARAMBA_PICTURES=FOLDER` keeps the screenshots; docs/pictures has them.
"""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image

from caramba.artifacts.studio.page import build_data, build_page, find
from caramba.artifacts.write import write
from tests.integration.studio_runs import make_sweep
from tests.unit.artifacts.sample_run import make_result

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
# Texts whose box another text covers, or that end outside of the page without a way to scroll to them.
FAULTS = """() => {
  const found = [];
  const shown = (node) => { const box = node.getBoundingClientRect(); return box.width > 0 && box.height > 0; };
  if (document.documentElement.scrollWidth > innerWidth) found.push(`page is ${document.documentElement.scrollWidth} wide`);
  for (const node of document.querySelectorAll("text, label, button, h1, h2, h3, p, figcaption, option, th, td, dd")) {
    if (node.tagName !== "OPTION" && shown(node) && node.textContent.trim()) {
      const size = parseFloat(getComputedStyle(node).fontSize);
      if (size < 9) found.push(`${size} px: ${node.textContent}`);
    }
  }
  for (const chart of document.querySelectorAll("figure svg")) {
    const frame = chart.getBoundingClientRect();
    const texts = [...chart.querySelectorAll("text")].filter((node) => shown(node) && !node.children.length);
    const boxes = texts.map((node) => [node.textContent, node.getBoundingClientRect()]);
    for (const [text, box] of boxes) {
      if (box.left < frame.left - 2 || box.right > frame.right + 2) found.push(`cut: ${text}`);
    }
    boxes.forEach(([one, a], index) => boxes.slice(index + 1).forEach(([other, b]) => {
      const [width, height] = [Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
      if (width > 2 && height > 4) found.push(`overlap: ${one} / ${other}`);
    }));
  }
  return found;
}"""


@pytest.fixture(name="page_file", scope="module")
def _page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("studio")
    before = Path.cwd()
    os.chdir(folder)
    try:
        make_sweep(folder / "runs")
        (folder / "studio.html").write_text(build_page(build_data(find(folder / "runs"), out=folder)))
    finally:
        os.chdir(before)
    return folder / "studio.html"


@pytest.fixture(name="report_file", scope="module")
def _report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    write(make_result(), run)
    return run / "artifacts" / "report.html"


@pytest.fixture(name="browser", scope="module")
def _browser():
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(name="open_tab")
def _open_tab(browser):
    """Open a file; a message of the console, or a request, fails the test at its end."""
    wrong: list[str] = []
    contexts = []

    def open_tab(file: Path, width: int = 1280, scheme: str = "light"):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on(
            "request", lambda request: wrong.extend([request.url] if request.url.startswith("http") else [])
        )
        tab.goto(file.as_uri())
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert wrong == []


def show(tab, title: str) -> None:
    tab.get_by_role("tab", name=title).click()


def keep_picture(tab, name: str) -> None:
    """Save a screenshot with 64 colours, which is a third of its bytes, where the pictures are asked for."""
    if folder := os.environ.get("CARAMBA_PICTURES"):
        Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(64).save(
            Path(folder) / name, optimize=True
        )


def rows_of(tab) -> list[str]:
    return [text.strip() for text in tab.locator("#runs tbody th button:not(.pin)").all_inner_texts()]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_view_of_the_studio_overlaps_or_cuts_a_text(
    page_file: Path, open_tab, width: int, scheme: str
) -> None:
    tab = open_tab(page_file, width, scheme)
    for title in ("Runs", "Differences", "Sweep", "Frontier"):
        show(tab, title)
        assert tab.evaluate(FAULTS) == [], title
        if title == "Runs":
            tab.get_by_label("mean over seeds").check()
        keep_picture(tab, f"studio_{title.lower()}_{width}_{scheme}.png")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_report_overlaps_or_cuts_no_text(report_file: Path, open_tab, width: int, scheme: str) -> None:
    tab = open_tab(report_file, width, scheme)
    assert tab.evaluate(FAULTS) == []
    keep_picture(tab, f"report_{width}_{scheme}.png")


def test_filter_sort_and_pin(page_file: Path, open_tab) -> None:
    tab = open_tab(page_file)
    assert len(rows_of(tab)) == 19
    tab.get_by_label("Filter").fill("state=finished train.lr>=0.002 seed=1")
    sync_api.expect(tab.locator("#counts")).to_have_text("4 of 19 runs")
    tab.get_by_label("Filter").fill("")
    sync_api.expect(tab.locator("#counts")).to_have_text("")
    column = tab.locator("#runs thead button", has_text="perplexity.student.perplexity")
    column.click()
    values = tab.evaluate(
        "rendered.runs.map((run) => metricValue(run, 0)).filter((value) => value !== undefined)"
    )
    assert values == sorted(values)
    column.click()
    values = tab.evaluate(
        "rendered.runs.map((run) => metricValue(run, 0)).filter((value) => value !== undefined)"
    )
    assert values == sorted(values, reverse=True)
    last = rows_of(tab)[-2]  # the very last is half written, and has no value
    tab.get_by_role("button", name=f"pin demo/{last}").click()
    assert rows_of(tab)[0] == last, "pinned runs come first"
    assert tab.locator("#legend button").count() == 1, "and are drawn alone"
    tab.reload()
    assert rows_of(tab)[0] == last, "the address keeps the view"


def test_every_number_leads_to_key_run_manifest_and_git(page_file: Path, open_tab) -> None:
    tab = open_tab(page_file)
    tab.get_by_label("Filter").fill("train.lr=0.001 seed=2 state=finished width=16")
    sync_api.expect(tab.locator("#counts")).to_have_text("1 of 19 runs")
    tab.locator("#runs td:has(.spread) button").first.click()
    shown = tab.locator("#detail").inner_text()
    for text in (
        "perplexity.student.perplexity",
        "standard error of the mean, n = 256",
        "manifest, SHA-256",
        "0123abc",
    ):
        assert text in shown, text


def test_curves_align_by_step_tokens_and_time_and_average_over_seeds(page_file: Path, open_tab) -> None:
    tab = open_tab(page_file)
    ends = {}
    for axis in ("step", "tokens", "time"):
        tab.get_by_label("By", exact=True).select_option(axis)
        ends[axis] = tab.evaluate("plot.data[0].at(-1)")
    assert ends == {"step": 200, "tokens": 200 * 1024, "time": 100}
    tab.get_by_label("mean over seeds").check()
    assert tab.locator("#legend button").count() == 6
    note = tab.locator("#curve-note").inner_text()
    assert "Band: ± one standard deviation over n runs" in note
    tab.get_by_label("Lines", exact=True).select_option("all")
    tab.get_by_label("mean over seeds").uncheck()
    assert tab.evaluate("plot.data.length") == 19, "steps, and the runs that have a curve"


def test_differences_show_only_what_differs(page_file: Path, open_tab) -> None:
    tab = open_tab(page_file)
    for button in tab.locator("#runs button.pin").all()[:3]:
        button.click()
    show(tab, "Differences")
    names = tab.locator("#differences tbody th").all_inner_texts()
    assert "seed" in names
    assert "name" not in names
    assert tab.locator("#differences thead th").count() == 4
    for row in tab.locator("#differences tbody tr").all():
        assert len(set(row.locator("td").all_inner_texts())) > 1


def test_frontier_has_the_runs_that_none_beats(page_file: Path, open_tab) -> None:
    tab = open_tab(page_file)
    show(tab, "Frontier")
    points = tab.evaluate(
        """() => { const [x, y] = [columnOf(view.fx), columnOf(view.fy)];
        const items = data.runs.map((run) => ({ x: x.value(run), y: y.value(run) })).filter((item) => item.x && item.y);
        return [items, frontOf(items, false, false)]; }"""
    )
    items, front = ([(item["x"], item["y"]) for item in found] for found in points)
    best = {one for one in items if not any(o[0] <= one[0] and o[1] <= one[1] and o != one for o in items)}
    assert set(front) == best
    assert len(best) > 1


def test_a_table_downloads_as_csv_without_formulas(page_file: Path, open_tab) -> None:
    tab = open_tab(page_file)
    with tab.expect_download() as found:
        tab.get_by_role("button", name="CSV").click()
    lines = Path(found.value.path()).read_text().splitlines()
    assert len(lines) == 20
    assert '"\'=SUM(A1)"' in "\n".join(lines)
