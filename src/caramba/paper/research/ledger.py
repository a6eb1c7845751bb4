"""research.jsonl: an append-only record of a loop, each line chained to the one before by its hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from caramba.errors import ConfigError
from caramba.runs.files import append_line, whole_lines

LEDGER = "research.jsonl"
FIRST = "0" * 64
_RUNS = (
    "registration",
    "proposal",
    "trial",
    "tuned",
    "run_started",
    "run",
    "look",
    "decision",
    "held_out_opened",
    "held_out_run",
)
EVENTS = frozenset((*_RUNS, "spend", "draft_begun", "draft", "review", "stop"))


class Ledger:
    """Appends events to the ledger of a folder, and reads them back."""

    def __init__(self, folder: Path) -> None:
        """Open the ledger, new or not.

        Raises:
            ConfigError: a line was changed, removed or cut short; it is named.
        """
        self.file = folder / LEDGER
        self.events = read_ledger(self.file)

    def append(self, event: str, **fields: Any) -> dict[str, Any]:
        """Write one event to disk before anything follows from it, and return its line.

        Raises:
            ConfigError: the held-out split was opened before.
        """
        if event not in EVENTS:
            raise ValueError(f"{event!r} is no event of the ledger")
        if event == "held_out_opened" and any(line["event"] == event for line in self.events):
            raise ConfigError(
                f"{self.file}: the held-out split was opened once and is not opened again; "
                "begin another loop on data that this one has not seen"
            )
        previous = self.events[-1]["sha256"] if self.events else FIRST
        line: dict[str, Any] = {"n": len(self.events) + 1, "previous": previous, "event": event, **fields}
        line["sha256"] = _hash(line)
        append_line(self.file, _text(line))
        self.events.append(line)
        return line

    def of(self, event: str) -> list[dict[str, Any]]:
        """Return the lines of one kind, in order."""
        return [line for line in self.events if line["event"] == event]


def read_ledger(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a ledger, none where there is no file.

    A last line without its line break is what a kill left; it is cut off, since nothing followed from it.

    Raises:
        ConfigError: a line that is not the one that was written.
    """
    lines: list[dict[str, Any]] = []
    previous = FIRST
    for number, text in enumerate(whole_lines(file), 1):
        wrong = f"{file}, line {number}: "
        try:
            plain: Any = json.loads(text)
        except ValueError:
            raise ConfigError(f"{wrong}not JSON; restore the file from a copy") from None
        line = cast("dict[str, Any]", plain) if isinstance(plain, dict) else {}
        if line.get("n") != number or line.get("previous") != previous or line.get("sha256") != _hash(line):
            raise ConfigError(
                f"{wrong}its hash is not that of its text and of the line before; it was changed, or a line before "
                "it was removed; restore the file from a copy"
            )
        previous = line["sha256"]
        lines.append(line)
    return lines


def _hash(line: dict[str, Any]) -> str:
    return hashlib.sha256(_text({key: value for key, value in line.items() if key != "sha256"}).encode()).hexdigest()


def _text(line: dict[str, Any]) -> str:
    return json.dumps(line, sort_keys=True, ensure_ascii=False, allow_nan=False)
