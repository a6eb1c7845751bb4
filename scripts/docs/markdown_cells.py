"""Markdown of the generated pages: headings with anchors, tables and cells."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

PLACEHOLDER = re.compile(r"<(?=[A-Za-z/!])")


def heading(text: str, anchor: str) -> list[str]:
    """Return a second-level heading with an anchor that does not depend on the text."""
    return [f"## {text} {{ #{anchor.lower()} }}", ""]


def code(value: Any) -> str:
    """Return a value as code that is safe in a table."""
    text = str(value).replace("\n", " ").replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def cell(text: str) -> str:
    """Return a sentence that is safe in a table."""
    return PLACEHOLDER.sub("&lt;", " ".join(text.split()).replace("|", "\\|"))


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, and an empty line."""
    return [
        f"| {' | '.join(names)} |",
        "|" + "---|" * len(names),
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]
