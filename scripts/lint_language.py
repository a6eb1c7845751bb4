"""Check texts and names for the words of language.toml. Counts per package may only fall.

Usage: python scripts/lint_language.py [--show PATH] [--update]
  --show PATH  list every finding under a path
  --update     lower the ceilings in scripts/ceilings.json to today's counts
A package without a ceiling (new or renamed) may use what packages that no longer exist were allowed.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ceilings import lower_ceilings, read_ceilings

ROOT = Path(__file__).resolve().parents[1]
WORDS = Path(__file__).with_name("language.toml")
HISTORY = ("docs/log.md", "docs/benchmarks.md")
FIRST_SENTENCE_WORDS = 20
COMMENT = re.compile(r"(?:^|\s)#(?!:) (.+)$")
SENTENCE_END = re.compile(r"[.!?:](?:\s|$)|\n\s*\n")
DEVICE_COMMENT = re.compile(r"//+ ?(.*)$")
PARTICIPLE = re.compile(r"(?!used|need|speed|seed|feed|embed|shared|fused|cached|replicated)[a-z]{2,}ed(_|$)")


class Finding(NamedTuple):
    path: str
    line: int
    word: str
    instead: str


class Words:
    """The lists of language.toml."""

    def __init__(self, file: Path = WORDS) -> None:
        data = tomllib.loads(file.read_text())
        self.texts: dict[str, str] = data["texts"]
        self.names: dict[str, str] = data["names"]
        self.exceptions: list[dict[str, str]] = data.get("exceptions", [])
        for item in self.exceptions:
            if not item.keys() >= {"word", "path", "reason"}:
                raise ValueError(f"{file.name}: exception {item}: expected word, path and reason")
        groups = (f"(?P<w{number}>{pattern})" for number, pattern in enumerate(self.texts))
        self._pattern = re.compile(rf"\b(?:{'|'.join(groups)})\b", re.IGNORECASE)
        self._instead = list(self.texts.values())

    def in_text(self, path: str, line: int, text: str) -> Iterator[Finding]:
        for match in self._pattern.finditer(text):
            word = match.group().lower()
            if not self.allows(word, path):
                number = int((match.lastgroup or "w0")[1:])
                yield Finding(path, line + text.count("\n", 0, match.start()), word, self._instead[number])

    def in_name(self, path: str, line: int, name: str) -> Iterator[Finding]:
        if name in self.names and not self.allows(name, path):
            yield Finding(path, line, name, self.names[name])

    def allows(self, word: str, path: str) -> bool:
        return any(item["word"] == word and path.startswith(item["path"]) for item in self.exceptions)


def check_python(words: Words, path: str, source: str) -> Iterator[Finding]:
    """Yield findings in comments, strings, docstrings and names of a Python file."""
    stem = Path(path).stem
    yield from words.in_name(path, 1, stem)
    for number, line in enumerate(source.splitlines(), 1):
        if "#" in line and (match := COMMENT.search(line)):
            yield from words.in_text(path, number, match.group(1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from words.in_text(path, node.lineno, node.value)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from words.in_name(path, node.lineno, node.name)
            if node.name.startswith("_"):
                continue
            yield from _check_first_sentence(path, node)
            is_participle = isinstance(node, ast.FunctionDef) and PARTICIPLE.match(node.name)
            if is_participle and not node.decorator_list and not words.allows(node.name, path):
                yield Finding(path, node.lineno, node.name, "a verb as the first word")


def _check_first_sentence(path: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[Finding]:
    first = SENTENCE_END.split(ast.get_docstring(node) or "", maxsplit=1)[0]
    if len(first.split()) > FIRST_SENTENCE_WORDS:
        yield Finding(path, node.lineno, f"{node.name}: {len(first.split())} words", f"at most {FIRST_SENTENCE_WORDS}")


def findings(words: Words, root: Path = ROOT) -> Iterator[Finding]:
    """Yield what the sources, kernels, scripts and pages contain; tests and histories are not read."""
    for folder in ("src/caramba", "kernels", "scripts"):
        for file in sorted((root / folder).rglob("*.py")):
            yield from check_python(words, str(file.relative_to(root)), file.read_text())
    for pattern in ("*.cu", "*.cuh", "*.metal"):
        for file in sorted((root / "kernels").rglob(pattern)):
            path = str(file.relative_to(root))
            yield from words.in_name(path, 1, file.stem)
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if match := DEVICE_COMMENT.search(line):
                    yield from words.in_text(path, number, match.group(1))
    for pattern in ("*.md", "docs/**/*.md"):
        for file in sorted(root.glob(pattern)):
            path = str(file.relative_to(root))
            if path not in (*HISTORY, "CHANGELOG.md"):
                yield from words.in_text(path, 1, file.read_text())


def package_of(path: str) -> str:
    """Return `src/caramba/layer`, `kernels/triton`, `scripts`, `docs`: what one ceiling is for."""
    parts = Path(path).parts
    depth = {"src": 3, "kernels": 2}.get(parts[0], 1)
    return "/".join(parts[: min(depth, len(parts) - 1)]) or parts[0]


def compare(counts: Counter[str], ceilings: dict[str, int]) -> list[str]:
    """Return what rose: one line a package, nothing if all counts are within their ceilings."""
    rose = [
        f"{name}: {count} findings, at most {ceilings[name]}"
        for name, count in sorted(counts.items())
        if name in ceilings and count > ceilings[name]
    ]
    new = {name: count for name, count in counts.items() if name not in ceilings}
    freed = sum(limit for name, limit in ceilings.items() if not (ROOT / name).exists())
    if sum(new.values()) > freed:
        rose.append(f"new packages {', '.join(sorted(new))}: {sum(new.values())} findings, at most {freed}")
    return rose


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", metavar="PATH")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args(argv)
    found = list(findings(Words()))
    if options.show is not None:
        for item in found:
            if item.path.startswith(options.show):
                print(f"{item.path}:{item.line}: {item.word!r}: {item.instead}")
        return 0
    counts = Counter(package_of(item.path) for item in found)
    ceilings: dict[str, Any] = read_ceilings("language")
    rose = compare(counts, ceilings) if ceilings else []
    for line in rose:
        print(f"language: {line}; list them: python scripts/lint_language.py --show PACKAGE")
    if options.update and not rose:
        present = (name for name in ceilings if (ROOT / name).exists())
        lower_ceilings("language", {**dict.fromkeys(present, 0), **counts}, replace_keys=True)
    print(f"language: {len(found)} findings, ceilings {sum(ceilings.values())}")
    return 1 if rose else 0


if __name__ == "__main__":
    sys.exit(main())
