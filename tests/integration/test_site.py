"""The documentation builds without a warning, all its links lead somewhere, and it is readable on narrow screens."""

from __future__ import annotations

import functools
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
WIDTHS = (1280, 390)
# Loads every page at every width and lists what is wider than its frame.
HARNESS = """<!doctype html><body><script>
const pages = %s, widths = %s, found = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width:${width}px;height:800px;border:0`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const root = frame.contentDocument.documentElement;
  const size = frame.contentWindow.getComputedStyle(frame.contentDocument.querySelector("article p")).fontSize;
  const tables = [...frame.contentDocument.querySelectorAll("article table")];
  const cut = Math.max(0, ...tables.map(table => table.scrollWidth - table.clientWidth));
  found.push([page, width, root.scrollWidth, parseFloat(size), cut]);
  frame.remove();
}
(async () => {
  for (const page of pages) for (const width of widths) await look(page, width);
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
})();
</script></body>"""


class Page(HTMLParser):
    """The ids of a page, its links, and what it loads."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        is_resource = tag == "link" and values.get("rel") in (
            "stylesheet",
            "icon",
            "preload",
            "modulepreload",
        )
        if "src" in values or is_resource:
            self.loads.append(values.get("src") or values.get("href", ""))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Pages that mkdocs makes; sweeps/ has a page of the studio, which tests/integration/test_studio_browser.py checks."""
    files = [file for file in site.rglob("*.html") if file.parent.name != "sweeps"]
    return {file: Page(file) for file in files if file.name != "404.html"}


def test_every_link_and_anchor_of_the_site_leads_somewhere(pages: dict[Path, Page]) -> None:
    broken = []
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", path) or link in ("#", "."):
                continue
            target = (file.parent / path).resolve() if path else file
            if target in pages:
                if anchor and anchor not in pages[target].ids:
                    broken.append(f"{file.name}: {link}")
            elif not target.exists():
                broken.append(f"{file.name}: {link}")
    assert len(pages) > 20
    assert not broken


def test_pages_load_nothing_from_the_network(pages: dict[Path, Page]) -> None:
    loads = {source for page in pages.values() for source in page.loads}
    assert not [source for source in loads if re.match(r"(https?:)?//", source)]
    for file, page in pages.items():
        for source in page.loads:
            assert source.startswith("data:") or (file.parent / source).exists(), (file.name, source)


def test_search_index_knows_every_page(site: Path, pages: dict[Path, Page]) -> None:
    index = json.loads((site / "search/search_index.json").read_text())
    found = {item["location"].partition("#")[0] for item in index["docs"]}
    assert {str(file.relative_to(site)) for file in pages} - {"index.html"} <= found | {"404.html"}
    assert any("surgery.kv_budget_bytes" in item["text"] for item in index["docs"])


def measured_by_chromium(site: Path, page: str, profile: Path) -> list[list[float]]:
    """Open a page of the site from a server of its own, and return what the page posts."""
    posted: queue.Queue[bytes] = queue.Queue()

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            posted.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--window-size=1400,900", f"http://127.0.0.1:{server.server_port}/{page}"]
    browser = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return json.loads(posted.get(timeout=150))
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        server.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which .ci/run installs")
def test_pages_fit_wide_and_narrow_screens(site: Path, pages: dict[Path, Page], tmp_path: Path) -> None:
    names = sorted(str(file.relative_to(site)) for file in pages)
    (site / "harness.html").write_text(HARNESS % (json.dumps(names), json.dumps(WIDTHS)))
    found = measured_by_chromium(site, "harness.html", tmp_path)
    assert len(found) == len(names) * len(WIDTHS)
    assert not [row for row in found if row[2] > row[1]], "wider than the screen"
    assert not [row for row in found if row[3] < 12], "letters under 12 px"
    assert not [row for row in found if row[1] == 1280 and row[4]], "a table needs scrolling on a wide screen"


SEARCH = """<script>
addEventListener("load", () => setTimeout(() => {
  const field = document.querySelector("input[name=query]");
  field.focus();
  field.value = "kv_budget_bytes";
  field.dispatchEvent(new Event("keyup", {bubbles: true}));
  const count = () => document.querySelectorAll(".md-search-result__item").length;
  setInterval(() => document.body.setAttribute("data-hits", count()), 200);
}, 1000));
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which .ci/run installs")
def test_search_works_in_pages_that_are_opened_from_disk(site: Path, tmp_path: Path) -> None:
    page = site / "search_from_disk.html"
    page.write_text((site / "index.html").read_text().replace("</body>", SEARCH))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    command += ["--virtual-time-budget=15000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    hits = re.search(r'data-hits="(\d+)"', done.stdout)
    assert hits, done.stderr[-2000:]
    assert int(hits[1]) >= 1
