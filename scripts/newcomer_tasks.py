"""Follow the pages of a new user, time each, and write the tables of docs/newcomer.md.

Usage: python scripts/newcomer_tasks.py [PAGE]...   (all pages, or those whose name is given)

Commands that train for minutes run in the short variant that the comments of a page name, as the tests of the pages
run them. The notebook runs as its page describes, pip and jupyter included, in an environment of its own, and its
executed copy is written to docs/.
"""

from __future__ import annotations

import json
import os
import shutil
import site
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration.page_blocks import Block, blocks_of  # noqa: E402 - the readers of pages are those of the tests
from tests.integration.test_tutorials import DOCS, Reader  # noqa: E402

PAGE = DOCS / "newcomer.md"
START, END = "<!-- from scripts/newcomer_tasks.py -->", "<!-- end of the tables -->"
TASKS = {
    "tutorials/own_text.md": "own text to a trained model",
    "tutorials/upcycle.md": "a student of a Hugging Face folder",
    "tutorials/sweeps.md": "a sweep and its table",
    "extend/layer.md": "a layer of your own",
    "extend/callback.md": "a callback of your own",
    "extend/loss.md": "a loss of your own",
    "tutorials/resume.md": "resume after a kill",
    "tutorials/generate.md": "serve a model and call it",
    "tutorials/export.md": "export, and load in transformers",
    "tutorials/notebook.md": "a notebook",
}
TUTORIALS = tuple(str(page.relative_to(DOCS)) for page in sorted(DOCS.glob("tutorials/*.md")))
QUICK = "tutorials/quickstart.md"


class NotebookReader(Reader):
    """Runs what the page of the notebook has a reader type, in an environment that also sees this one."""

    longest_s = 600

    def __init__(self, folder: Path, cache: Path) -> None:
        super().__init__(folder, cache)
        venv.create(folder / "venv", with_pip=True)
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        calls = (f"site.addsitedir({path!r})" for path in site.getsitepackages())
        (packages / "outer.pth").write_text(f"import site; {'; '.join(calls)}\n")

    def take(self, block: Block) -> None:
        if block.language == "bash":
            block.notes.pop("skip", None)
        super().take(block)

    def variables(self) -> dict[str, str]:
        found = super().variables()
        return {**found, "PATH": f"{self.folder / 'venv/bin'}{os.pathsep}{found['PATH']}"}


def main(names: Sequence[str]) -> int:
    """Time the pages and write their rows."""
    pages = [page for page in dict.fromkeys((*TASKS, *TUTORIALS)) if not names or Path(page).stem in names]
    if any(starts_from_quickstart(page) for page in pages):
        pages = [QUICK, *(page for page in pages if page != QUICK)]
    rows = read_rows()
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        for page in pages:
            place = Path(folder) / Path(page).stem
            place.mkdir()
            if starts_from_quickstart(page):
                shutil.copytree(Path(folder) / "quickstart/runs", place / "runs", symlinks=True)
            rows[page] = follow_page(DOCS / page, place, cache)
            write_tables(rows)
            print(f"{page}: {rows[page]:.1f} s", flush=True)
    return 0


def starts_from_quickstart(page: str) -> bool:
    """Return whether a page begins with the run of the quickstart."""
    return any(block.language == "after" for block in blocks_of(DOCS / page))


def follow_page(page: Path, folder: Path, cache: Path) -> float:
    """Follow a page and return the seconds that it took."""
    began = time.monotonic()
    reader = (NotebookReader if page.stem == "notebook" else Reader)(folder, cache)
    try:
        reader.follow(page)
    finally:
        reader.stop()
    seconds = time.monotonic() - began
    if page.stem == "notebook":
        keep_executed(folder / "executed.ipynb")
    return seconds


def keep_executed(file: Path) -> None:
    """Keep the executed notebook in docs/, without warnings, times and versions of this machine."""
    notebook = json.loads(file.read_text())
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if "outputs" in cell:
            cell["outputs"] = [output for output in cell["outputs"] if output.get("name") != "stderr"]
    notebook["metadata"]["language_info"] = {"name": "python"}
    text = json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True)
    (DOCS / "first_experiment_executed.ipynb").write_text(text + "\n")


def count_steps(page: Path) -> tuple[int, int]:
    """Return the commands that a page has its reader type, Python blocks among them, and the files to write."""
    blocks = [block for block in blocks_of(page) if "skip" not in block.notes or page.stem == "notebook"]
    files = sum(block.title is not None for block in blocks)
    typed = sum(len(block.lines()) for block in blocks if block.language == "bash")
    return typed + sum(block.language == "python" and block.title is None for block in blocks), files


def read_rows() -> dict[str, float]:
    """Return the seconds of each page that the tables have."""
    found: dict[str, float] = {}
    for line in PAGE.read_text().splitlines():
        for page in (*TASKS, *TUTORIALS):
            if f"]({page})" in line and line.startswith("|"):
                seconds = line.strip("|").rpartition("|")[2].strip()
                found |= {page: float(seconds)} if seconds else {}
    return found


def write_tables(rows: dict[str, float]) -> None:
    """Write both tables, with the commands that the pages have now."""
    lines = ["| task | page | commands | files to write | seconds |", "|---|---|---|---|---|"]
    for page, task in TASKS.items():
        typed, files = count_steps(DOCS / page)
        lines.append(f"| {task} | [{Path(page).stem}]({page}) | {typed} | {files} | {_cell(rows, page)} |")
    lines += ["", "All tutorials, in the same short variants:", "", "| tutorial | seconds |", "|---|---|"]
    lines += [f"| [{Path(page).stem}]({page}) | {_cell(rows, page)} |" for page in TUTORIALS]
    lines.append(f"| all | {sum(rows.get(page, 0) for page in TUTORIALS):.0f} |")
    text = PAGE.read_text()
    head, tail = text.partition(START)[0], text.partition(END)[2]
    PAGE.write_text("\n".join([f"{head}{START}", "", *lines, "", f"{END}{tail}"]))


def _cell(rows: dict[str, float], page: str) -> str:
    return f"{rows[page]:.0f}" if page in rows else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
