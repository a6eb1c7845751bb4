"""The documentation builds without a warning, all its links lead somewhere, and it is readable on narrow screens."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
# What is wider than the screen, the letters of the text, and what the widest table hides.
MEASURE = """() => {
  const root = document.documentElement, text = document.querySelector("article p");
  const tables = [...document.querySelectorAll("article table")];
  const cut = Math.max(0, ...tables.map(table => table.scrollWidth - table.clientWidth));
  return [root.scrollWidth, parseFloat(getComputedStyle(text).fontSize), cut];
}"""
WIDTHS = (1280, 390)
PICTURED = {
    "index.html": "site_home",
    "tutorials/own_text.html": "site_tutorial",
    "reference/training.html": "site_keys",
}


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


@pytest.fixture(name="tab", scope="module")
def _tab() -> Iterator[Any]:
    """A tab of Chromium without a network."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser.new_context(offline=True).new_page()
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which .ci/run installs")
def test_pages_fit_the_screen(site: Path, pages: dict[Path, Page], tab: Any) -> None:
    """`CARAMBA_PICTURES=FOLDER` keeps screenshots of three pages; docs/pictures has them."""
    found = {}
    for file in pages:
        name = str(file.relative_to(site))
        tab.set_viewport_size({"width": WIDTHS[0], "height": 900})
        tab.goto(file.as_uri(), wait_until="domcontentloaded")
        tab.add_style_tag(content="* { transition: none !important }")
        for width in WIDTHS:  # loading a page takes longer than laying it out anew
            tab.set_viewport_size({"width": width, "height": 900})
            found[name, width] = tab.evaluate(MEASURE)
            if name in PICTURED and (folder := os.environ.get("CARAMBA_PICTURES")):
                tab.wait_for_load_state()
                picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB").quantize(64)
                picture.save(Path(folder) / f"{PICTURED[name]}_{width}.png", optimize=True)
    assert not {place: row for place, row in found.items() if row[0] > place[1]}, "wider than the screen"
    assert not {place: row for place, row in found.items() if row[1] < 12}, "letters under 12 px"
    cut = {place: row for place, row in found.items() if row[2] and place[1] == WIDTHS[0]}
    assert not cut, "a table needs scrolling on a wide screen"


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, which .ci/run installs")
def test_search_works_in_pages_that_are_opened_from_disk(site: Path, tab: Any) -> None:
    tab.set_viewport_size({"width": 1280, "height": 900})
    tab.goto((site / "index.html").as_uri())
    field = tab.locator("input[name=query]")
    field.click()
    field.press_sequentially("kv_budget_bytes")
    tab.locator(".md-search-result__item").first.wait_for(timeout=60_000)
