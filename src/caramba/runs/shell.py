"""Commands as messages print them: each can be copied into a shell and parses back to the same words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def join_words(words: Iterable[str | Path]) -> str:
    """Return a command line of one line; control characters are escaped in a `$'...'` word of bash and zsh."""
    return " ".join(_quote(str(word)) for word in words)


def show_path(path: Path) -> str:
    """Return a path as one shell word, relative to the current folder if it is below that."""
    here = Path.cwd()
    return _quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _quote(word: str) -> str:
    if not _CONTROL.search(word):
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'")
    return f"$'{_CONTROL.sub(lambda match: _escape(match[0]), escaped)}'"


def _escape(letter: str) -> str:
    # Bash reads \x as a byte, and \u as the character that a C1 control is.
    return f"\\x{ord(letter):02x}" if ord(letter) < 0x80 else f"\\u{ord(letter):04x}"
