"""Every command, file and Python block of the README and the tutorials runs, in order, as a reader would type it.

The notes in comments of a page, listed in page_blocks.py, make short variants of what trains for minutes.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from caramba.cli import main
from tests.integration.commands import (
    SMALL,
    SMALL_TEACHER,
    Forked,
    caramba,
    environment,
    interrupt_when,
    started,
)
from tests.integration.page_blocks import Block, blocks_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
QUICKSTART = DOCS / "tutorials" / "quickstart.md"
OTHERS = sorted(
    [
        *(ROOT / "README.md", DOCS / "layers.md", DOCS / "extensions.md"),
        *(*DOCS.glob("tutorials/*.md"), *DOCS.glob("extend/*.md")),
    ],
)
OTHERS.remove(QUICKSTART)
SHELL = set("|&;<>$`")
TINY = " ".join((*SMALL, *SMALL_TEACHER))


class Reader:
    """Follows one page in a folder. No command may take longer than `longest_s`."""

    longest_s = 200

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder, self.cache = folder, cache
        self.commands = contextlib.ExitStack()
        self.background: list[Forked | subprocess.Popen[str]] = []

    def follow(self, page: Path) -> None:
        for block in blocks_of(page):
            self.take(block)

    def take(self, block: Block) -> None:
        if "skip" in block.notes or block.language in ("text", "mermaid", "after"):
            return
        if block.title is not None:
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.body)
        elif block.language == "setup":
            self.expect(self.bash(block.body), 0)
        elif block.language == "python":
            (self.folder / "block.py").write_text(block.body)
            self.expect(caramba((), self.folder, self.cache, module="block"), 0)
        elif block.language == "bash":
            self.take_commands(block)

    def take_commands(self, block: Block) -> None:
        lines, more = block.lines(), block.notes.get("with", "").replace("TINY", TINY)
        for number, line in enumerate(lines, 1):
            words = shlex.split(line, comments=True)
            is_caramba = words[0] == "caramba"
            if is_caramba and more and words[1] in ("launch", "run", "compile", "-m"):
                words += shlex.split(more)
            wanted = int(block.notes.get("status", 0)) if number == len(lines) else 0
            if "background" in block.notes:
                self.background.append(self.commands.enter_context(started(words[1:], self.folder, self.cache)))
            elif "interrupt" in block.notes:
                self.end(words, block.notes["interrupt"], signal.SIGINT, 130)
            elif "kill" in block.notes:
                self.end(words, block.notes["kill"], signal.SIGKILL, -signal.SIGKILL)
            elif is_caramba and not SHELL & set(line.partition(" #")[0]):
                words = [name for word in words[1:] for name in self.expanded(word)]
                self.expect(caramba(words, self.folder, self.cache), wanted)
            else:
                self.expect(self.bash(line), wanted)

    def expanded(self, word: str) -> list[str]:
        """Return the files that a pattern of the shell stands for, else the word."""
        files = sorted(self.folder.glob(word)) if "*" in word else []
        return [str(file.relative_to(self.folder)) for file in files] or [word]

    def expect(self, done: subprocess.CompletedProcess[str], status: int) -> None:
        assert done.returncode == status, f"{done.args}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"

    def bash(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.variables(),
            capture_output=True,
            text=True,
            check=False,
            timeout=self.longest_s,
        )

    def end(self, words: list[str], pattern: str, how: signal.Signals, status: int) -> None:
        assert interrupt_when(pattern, words[1:], self.folder, self.cache, how) == status, words

    def stop(self) -> None:
        for process in self.background:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
        self.commands.close()

    def variables(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return {**environment(self.cache), "PATH": path, "DOCS": str(DOCS)}


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """The folder of a reader who has finished the quickstart; its run is what most pages begin with."""
    folder = tmp_path_factory.mktemp("quickstart")
    Reader(folder, cache).follow(QUICKSTART)
    return folder


def test_quickstart_leaves_a_report(quickstart: Path) -> None:
    (report,) = quickstart.glob("runs/*/*/artifacts/report.html")
    assert "<html" in report.read_text()


def test_reference_lists_what_a_run_writes(quickstart: Path) -> None:
    """Every file, column and metric of the quickstart's run has exactly one row in the reference."""
    (run,) = (file.parent for file in quickstart.glob("runs/*/*/manifest.json"))
    names = {
        "run": [
            str(file.relative_to(run)) for file in run.rglob("*") if file.is_file() and "artifacts" not in file.parts
        ],
        "artifacts": [file.name for file in (run / "artifacts").iterdir()],
        "columns": (run / "metrics.csv").read_text().splitlines()[0].split(","),
        "metrics": list(json.loads((run / "artifacts/report.json").read_text())["metrics"]),
    }
    code = "import catalogue, json, sys; names = json.load(sys.stdin); print(json.dumps("
    code += "[name for part in names for name in names[part] if len(catalogue.matching(part, name)) != 1]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "scripts/docs",
        input=json.dumps(names),
        capture_output=True,
        text=True,
        check=True,
    )
    assert sum(map(len, names.values())) > 80
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_page_works_when_it_is_followed(page: Path, quickstart: Path, cache: Path, tmp_path: Path) -> None:
    if any(block.language == "after" for block in blocks_of(page)):
        shutil.copytree(quickstart / "runs", tmp_path / "runs", symlinks=True)
    reader = Reader(tmp_path, cache)
    began = time.monotonic()
    try:
        reader.follow(page)
    finally:
        reader.stop()
    print(f"{page.stem}: {time.monotonic() - began:.0f} s")


def test_there_are_ten_tutorials_with_commands_that_run() -> None:
    live = [
        page
        for page in [QUICKSTART, *OTHERS]
        if any(block.language == "bash" and "skip" not in block.notes for block in blocks_of(page))
    ]
    assert len(live) >= 10


def test_ten_tasks_of_a_new_user_take_under_ten_commands_each() -> None:
    """The table of docs/newcomer.md has the commands that the pages have now, and seconds for each."""
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        tasks = importlib.import_module("newcomer_tasks")
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    lines, seconds = (DOCS / "newcomer.md").read_text().splitlines(), tasks.read_rows()
    assert len(tasks.TASKS) == 10
    for page, task in tasks.TASKS.items():
        typed, files = tasks.count_steps(DOCS / page)
        assert 0 < typed < 10, page
        assert float(seconds[page]) > 0
        (line,) = [line for line in lines if line.startswith(f"| {task} |")]
        assert f"| {typed} | {files} |" in line, page


def test_blocks_have_a_language_that_is_run_or_shown() -> None:
    for page in [QUICKSTART, *OTHERS]:
        for block in blocks_of(page):
            assert block.language in ("bash", "python", "yaml", "text", "mermaid", "setup", "after"), page
            assert block.language != "yaml" or block.title, f"{page.name}: a block of YAML needs a title"


@pytest.mark.usefixtures("cache")
def test_features_page_names_plans_that_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every `caramba compile` of docs/features.md makes a plan."""
    calls = re.findall(r"`caramba compile ([^`]*)`", (DOCS / "features.md").read_text())
    assert len(calls) > 15
    monkeypatch.chdir(tmp_path)
    for call in calls:
        words = re.findall(r"\S+=\{[^}]*\}|\S+", call)
        assert main(["compile", *words]) == 0, f"{call}\n{capsys.readouterr().err}"
