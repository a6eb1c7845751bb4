"""Fenced blocks of a page of the documentation, and the notes in comments that its test reads.

`<!-- test: with WORDS -->`       append words to the commands of the next block that train: a short variant
`<!-- test: skip REASON -->`      do not run the next block
`<!-- test: status N -->`         the last command of the next block ends with this exit status
`<!-- test: interrupt GLOB -->`   send Ctrl-C to the next block's command once a file matches
`<!-- test: kill GLOB -->`         send SIGKILL instead
`<!-- test: background -->`       start the next block's command and continue; it ends with the page
`<!-- test: setup COMMAND -->`    run a command of bash here; $DOCS is the folder of the documentation
`<!-- test: after quickstart -->` begin in a folder with the run of the quickstart
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(
    r"^<!-- test: (?P<note>.*?) -->$|^```(?P<language>\w+)(?P<options>[^\n]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
TITLE = re.compile(r'title="([^"]+)"')
KINDS = ("with", "skip", "status", "interrupt", "kill", "background", "setup", "after")


@dataclass
class Block:
    """One fenced block with its notes, or a setup without a block."""

    language: str
    body: str
    title: str | None = None
    notes: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the commands of a block of bash, continued lines joined."""
        joined = self.body.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order.

    Raises:
        ValueError: an unknown note, or a skip without a reason.
    """
    notes: dict[str, str] = {}
    for match in FENCE.finditer(page.read_text()):
        if match["note"] is None:
            title = TITLE.search(match["options"])
            yield Block(match["language"], match["body"], title[1] if title else None, notes)
            notes = {}
            continue
        kind, _, words = match["note"].partition(" ")
        if kind not in KINDS or (kind == "skip" and len(words) < 8):
            raise ValueError(f"{page.name}: note {match['note']!r}: expected one of {', '.join(KINDS)}")
        if kind in ("setup", "after"):
            yield Block(kind, words)
        else:
            notes[kind] = words
