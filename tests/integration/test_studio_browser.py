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
from caramba.runs.events import append_event
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
# Texts under 9 px as they are shown (a figure may be scaled), texts that cover each other, and texts that end outside of
# what is in sight without a way to scroll to them. A text's boxes are those of its lines, within what scrolls it.
FAULTS = """() => {
  const found = [], boxes = [];
  if (document.documentElement.scrollWidth > innerWidth) found.push(`page is ${document.documentElement.scrollWidth} wide`);
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const owner = node.parentElement, text = node.textContent.trim();
    if (!text || owner.closest("script, style, option, title, desc, template") || !owner.checkVisibility()) continue;
    const chart = owner.closest("figure svg"), style = getComputedStyle(owner);
    const scale = owner.getScreenCTM ? Math.abs(owner.getScreenCTM().a || owner.getScreenCTM().b) : 1;
    const size = parseFloat(style.fontSize) * scale;
    if (size < 9) found.push(`${size.toFixed(1)} px: ${text}`);
    if (style.overflow === "hidden" && owner.scrollWidth > owner.clientWidth + 1 && !owner.title) found.push(`cut: ${text}`);
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const rect of range.getClientRects()) {
      let box = { left: rect.left, right: rect.right, top: rect.top, bottom: rect.bottom };
      if (chart) {
        const frame = chart.getBoundingClientRect();
        if (box.left < frame.left - 2 || box.right > frame.right + 2 || box.top < frame.top - 2 || box.bottom > frame.bottom + 2)
          found.push(`outside of its figure: ${text}`);
      }
      for (let up = owner.parentElement; up; up = up.parentElement) {
        if (getComputedStyle(up).overflowX === "visible") continue;
        const edge = up.getBoundingClientRect();
        box = { left: Math.max(box.left, edge.left), right: Math.min(box.right, edge.right), top: Math.max(box.top, edge.top), bottom: Math.min(box.bottom, edge.bottom) };
      }
      if (box.right > box.left && box.bottom > box.top) boxes.push([text, owner, box]);
    }
  }
  boxes.sort((one, other) => one[2].top - other[2].top);
  boxes.forEach(([one, first, a], index) => {
    for (const [other, second, b] of boxes.slice(index + 1)) {
      if (b.top > a.bottom) break;
      const [width, height] = [Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
      if (width > 2 && height > 5 && !first.contains(second) && !second.contains(first)) found.push(`overlap: ${one} / ${other}`);
    }
  });
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
    """A report with every figure: curves of two phases, and what benchmarks and checks measured."""
    run = tmp_path_factory.mktemp("run")
    append_event(run, "run_started")
    for phase, steps, loss in (("blockwise_0", 1200, 0.5), ("global_0", 400, 3.0)):
        for step in range(10, steps + 1, 10):
            values = {"running_loss": loss + 10 / step, "lr": 1e-3, "tokens_per_s": 5000.0 + step}
            append_event(run, "metrics", phase=phase, step=step, values=values)
        append_event(run, "metrics", phase=phase, step=steps, values={"val_loss": loss})
    append_event(run, "run_finished")
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
        tab.on("request", lambda request: wrong.extend([request.url] if request.url.startswith("http") else []))
        tab.goto(file.as_uri())
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    assert wrong == []


def show(tab, title: str) -> None:
    tab.get_by_role("tab", name=title).click()


def keep_picture(tab, name: str) -> None:
    """Save a screenshot with 128 colours, which is half of its bytes, where the pictures are asked for."""
    if folder := os.environ.get("CARAMBA_PICTURES"):
        Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(128).save(Path(folder) / name, optimize=True)


def rows_of(tab) -> list[str]:
    return [text.strip() for text in tab.locator("#runs tbody th button:not(.pin)").all_inner_texts()]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_no_view_of_the_studio_overlaps_or_cuts_a_text(page_file: Path, open_tab, width: int, scheme: str) -> None:
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
    for details in tab.locator("details").all():
        details.evaluate("node => { node.open = true; }")
    assert tab.locator("figure img").count() >= 5
    assert tab.evaluate(FAULTS) == []
    shown = "nodes => nodes.map(node => [node.clientWidth, node.naturalWidth])"
    for width_shown, natural in tab.locator("figure img").evaluate_all(shown):
        assert width_shown >= natural > 0, "a figure keeps the size at which its texts were checked"
    keep_picture(tab, f"report_{width}_{scheme}.png")


def test_faults_are_found(open_tab, tmp_path: Path) -> None:
    """The check of this file sees a small, a covered and a cut text, also where a figure is scaled."""
    (tmp_path / "bad.html").write_text(
        "<body style='margin:0;width:1000px'><p style='font-size:8px'>small</p>"
        "<p style='position:absolute;top:100px'>under</p><p style='position:absolute;top:100px'>over</p>"
        "<p style='position:absolute;top:200px;width:40px;overflow:hidden;white-space:nowrap'>a long text</p>"
        "<figure style='position:absolute;top:300px'><svg width=100 height=50 viewBox='0 0 400 200'>"
        "<text x=10 y=60 font-size=16>scaled</text><text x=390 y=100 font-size=40>edge</text></svg></figure>"
    )
    found = open_tab(tmp_path / "bad.html", 390).evaluate(FAULTS)
    for text in (
        "page is",
        "8.0 px: small",
        "overlap: under / over",
        "cut: a long",
        "4.0 px: scaled",
        "outside of its figure: edge",
    ):
        assert any(text in fault for fault in found), (text, found)


def test_filter_sort_and_pin(page_file: Path, open_tab) -> None:
    tab = open_tab(page_file)
    assert len(rows_of(tab)) == 19
    tab.get_by_label("Filter").fill("state=finished train.lr>=0.002 seed=1")
    sync_api.expect(tab.locator("#counts")).to_have_text("4 of 19 runs")
    tab.get_by_label("Filter").fill("")
    sync_api.expect(tab.locator("#counts")).to_have_text("")
    column = tab.locator("#runs thead button", has_text="perplexity.student.perplexity")
    column.click()
    values = tab.evaluate("rendered.runs.map((run) => metricValue(run, 0)).filter((value) => value !== undefined)")
    assert values == sorted(values)
    column.click()
    values = tab.evaluate("rendered.runs.map((run) => metricValue(run, 0)).filter((value) => value !== undefined)")
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
