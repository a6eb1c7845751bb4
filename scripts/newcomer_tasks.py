"""Do the ten tasks of a new user as their pages describe them, time each, and write the table of docs/newcomer.md.

Usage: python scripts/newcomer_tasks.py [PAGE]...   (all pages, or those whose name is given)

Commands that train for minutes run in the short variant that the comments of a page name, as the tests of the pages
run them. The notebook needs nbclient and ipykernel, and its executed copy is written to docs/.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.integration.page_blocks import blocks_of  # noqa: E402 - the readers of pages are those of the tests
from tests.integration.test_tutorials import DOCS, QUICKSTART, Reader  # noqa: E402

PAGE = DOCS / "newcomer.md"
START, END = "<!-- from scripts/newcomer_tasks.py -->", "<!-- end of the table -->"
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


def main(names: Sequence[str]) -> int:
    """Time the tasks and write their rows."""
    rows = read_rows()
    with tempfile.TemporaryDirectory() as folder:
        start, cache = Path(folder) / "start", Path(folder) / "cache"
        for page in [page for name in names for page in TASKS if Path(page).stem == name] or TASKS:
            place = Path(folder) / Path(page).stem
            place.mkdir()
            if any(block.language == "after" for block in blocks_of(DOCS / page)):
                if not start.exists():
                    start.mkdir()
                    Reader(start, cache).follow(QUICKSTART)
                shutil.copytree(start / "runs", place / "runs", symlinks=True)
            rows[page] = f"{follow_page(DOCS / page, place, cache):.0f}"
            write_rows(rows)
            print(f"{page}: {rows[page]} s", flush=True)
    return 0


def follow_page(page: Path, folder: Path, cache: Path) -> float:
    """Follow a page and return the seconds that it took."""
    reader, began = Reader(folder, cache), time.monotonic()
    try:
        reader.follow(page)
        if page.stem == "notebook":
            execute_notebook(folder)
    finally:
        reader.stop()
    return time.monotonic() - began


def execute_notebook(folder: Path) -> None:
    """Execute the notebook and keep its copy, without warnings and versions of this machine."""
    import nbclient
    import nbformat

    notebook = nbformat.read(DOCS / "first_experiment.ipynb", as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=600, record_timing=False, resources={"metadata": {"path": str(folder)}}
    ).execute()
    for cell in notebook.cells:
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["language_info"] = {"name": "python"}
    (DOCS / "first_experiment_executed.ipynb").write_text(nbformat.writes(notebook) + "\n")


def count_steps(page: Path) -> tuple[int, int]:
    """Return the commands that a page has its reader type, Python blocks among them, and the files to write."""
    blocks = [block for block in blocks_of(page) if "skip" not in block.notes or page.stem in ("notebook",)]
    files = sum(block.title is not None for block in blocks)
    typed = sum(len(block.lines()) for block in blocks if block.language == "bash")
    return typed + sum(block.language == "python" and block.title is None for block in blocks), files


def read_rows() -> dict[str, str]:
    """Return the seconds of each page that the table has."""
    found: dict[str, str] = {}
    for line in PAGE.read_text().splitlines():
        for page in TASKS:
            if f"]({page})" in line and line.startswith("|"):
                found[page] = line.strip("|").rpartition("|")[2].strip()
    return found


def write_rows(rows: dict[str, str]) -> None:
    """Write the table, with the commands that the pages have now."""
    lines = ["| task | page | commands | files to write | seconds |", "|---|---|---|---|---|"]
    for page, task in TASKS.items():
        typed, files = count_steps(DOCS / page)
        lines.append(f"| {task} | [{Path(page).stem}]({page}) | {typed} | {files} | {rows.get(page, '')} |")
    text = PAGE.read_text()
    head, tail = text.partition(START)[0], text.partition(END)[2]
    PAGE.write_text("\n".join([f"{head}{START}", "", *lines, "", f"{END}{tail}"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
