"""The README is one short page, pages are readable, and their links and commands exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from caramba.launch.commands.table import COMMANDS

ROOT = Path(__file__).parents[2]
GENERATED = ("benchmarks.md", "log.md")
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name not in GENERATED)]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
COMMAND = re.compile(r"(?:^    |`|\$ )caramba ([a-z]+)", re.MULTILINE)


def paragraphs_of(page: Path) -> list[str]:
    """Return paragraphs and list items, without code, tables, headings and pictures."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    blocks = re.split(r"\n\s*\n|\n(?=- )", text)
    return [block for block in blocks if block.strip() and not block.lstrip("\n").startswith(("    ", "|", "#", "!["))]


def sentences_of(paragraph: str) -> list[int]:
    plain = re.sub(r"`[^`]*`", "code", paragraph)
    return [len(part.split()) for part in re.split(r"(?<=[.:;?!])\s+", plain) if part.split()]


def test_readme_is_at_most_900_words() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_paragraphs_and_sentences_are_short(page: Path) -> None:
    paragraphs = paragraphs_of(page)
    longest = max(paragraphs, key=lambda text: len(text.split()))
    assert len(longest.split()) <= 80, longest
    lengths = [length for text in paragraphs for length in sentences_of(text)]
    assert sum(lengths) / len(lengths) <= 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_links_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    # Pages under reference/ are made when the site is built; tests/integration/test_site.py checks links to them.
    links = [link for link in LINK.findall(text) if "://" not in link and "reference/" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    unknown = set(COMMAND.findall(text)) - set(COMMANDS)
    assert not unknown


def messages_of_the_sources() -> str:
    """Return all texts of the sources, with `…` for values."""
    texts = []
    for file in (ROOT / "src/caramba").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_troubleshooting_quotes_messages_of_the_sources() -> None:
    quoted = re.findall(r"^### `(.+?)`", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    texts = messages_of_the_sources()
    assert len(quoted) > 15
    assert not [message for message in quoted if message not in texts]
