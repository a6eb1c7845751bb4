"""The letters of a section as TeX reads them: without comments, and names behind a backslash whole."""

from __future__ import annotations

from caramba.paper.scanned import NotAllowed


class Source:
    """A place in a text, and the line that it is on."""

    def __init__(self, source: str) -> None:
        self.source, self.at, self.line = source, 0, 1

    def name(self) -> str:
        """Read the name behind a backslash, where % begins no comment and ends a name."""
        letter = self.raw()
        if not letter:
            raise NotAllowed("a backslash at the end", self.line)
        self.at += 1
        if not (letter.isascii() and letter.isalpha()):
            self.line += letter == "\n"
            return " " if letter.isspace() else letter
        name = letter
        while self.raw().isascii() and self.raw().isalpha():
            name += self.raw()
            self.at += 1
        if name == "operatorname" and self.raw() == "*":
            self.at += 1
            return name + "*"
        self._blanks()
        if self.raw() == "\n" and not self.blank_line_follows(self.at + 1):
            self.at, self.line = self.at + 1, self.line + 1  # TeX drops the space behind a name
            self._blanks()
        return name

    def verbatim(self, command: str, line: int) -> str:
        """Read a name up to its closing brace: names hold no braces, backslashes or comments."""
        end = self.source.find("}", self.at)
        text = self.source[self.at : end] if end >= 0 else ""
        if end < 0 or any(sign in text for sign in "{\\%\n$~#"):
            raise NotAllowed(rf"\{command} expects a plain name in braces, got {text[:40]!r}", line)
        self.at = end + 1
        return text.strip()

    def raw(self) -> str:
        return self.source[self.at : self.at + 1]

    def peek(self) -> str:
        """Return the letter that TeX reads next, behind comments; not for what follows a backslash: \\% prints."""
        while self.raw() == "%":
            end = self.source.find("\n", self.at)
            self.line += 1
            self.at = len(self.source) if end < 0 else end + 1
            self._blanks()  # that begin a line print nothing
        return self.raw()

    def next(self) -> str | None:
        letter = self.peek() or None
        self.at += 1
        if letter == "\n":
            self.line += 1
        return letter

    def _blanks(self) -> None:
        while self.raw() in (" ", "\t"):
            self.at += 1

    def blank_line_follows(self, at: int | None = None) -> bool:
        at = self.at if at is None else at
        end = self.source.find("\n", at)
        return not self.source[at : len(self.source) if end < 0 else end].strip(" \t")
