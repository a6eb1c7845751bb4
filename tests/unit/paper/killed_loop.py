"""A research loop in a process of its own, which kills itself by SIGKILL right behind the first event of each kind.

What is paid for and what is run is in files, so that it is counted over all processes.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stub_model import PROPOSAL, StubModel
from test_research_ledger import TRIALS, Launcher
from test_research_loop import PAPER, REVIEW, settings

from caramba.paper import ResearchLoop, client, drafter, gate
from caramba.paper.compile import Compiled
from caramba.paper.research import experiment, loop
from caramba.paper.research.journal import Journal
from caramba.paper.research.ledger import Ledger
from caramba.runs.files import append_line

KINDS, PAID, RUNS, RESULT = "kinds.txt", "paid.txt", "runs.txt", "result.txt"


def lines_of(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.is_file() else []


def run(base: Path, folder: Path, is_killed: bool) -> None:
    """Run or resume the loop on the run `base`; its reason to stop is in RESULT."""
    drafter.need_latex = loop.need_latex = lambda where: None
    loop.read_limits = lambda config: None
    gate.compile_paper = _compiled
    drafter.unknown_digits = lambda *arguments: None
    experiment.Comparison._plan = lambda self, name, manifest: None
    model, launcher = StubModel(proposal={**PROPOSAL, "trials": TRIALS}), Launcher()

    def send(body: dict[str, Any]) -> dict[str, Any]:
        append_line(folder / PAID, json.dumps(body, sort_keys=True))
        return model.send(body)

    def launch(command: Any, place: Path, timeout_s: float | None) -> int:
        append_line(folder / RUNS, place.as_posix())
        return launcher(command, place, timeout_s)

    client.open_transport = lambda config: send
    if is_killed:
        _kill_behind_events(folder / KINDS)
    made = ResearchLoop(PAPER, REVIEW, settings(base), output_dir=folder / "paper", launch=launch)
    (folder / RESULT).write_text(made.run_sync(base).reason)


def _compiled(files: Mapping[str, bytes]) -> Compiled:
    return Compiled(b"%PDF of " + files["paper.tex"], None)


def _kill_behind_events(file: Path) -> None:
    append, add = Ledger.append, Journal.add

    def kill(kind: str) -> None:
        if kind not in lines_of(file):
            append_line(file, kind)
            os.kill(os.getpid(), signal.SIGKILL)

    def appended(self: Ledger, event: str, **fields: Any) -> dict[str, Any]:
        line = append(self, event, **fields)
        kill(event)
        return line

    def added(self: Journal, request: dict[str, Any], reply: dict[str, Any]) -> None:
        add(self, request, reply)
        kill(f"call of {self.step}")

    Ledger.append, Journal.add = appended, added
