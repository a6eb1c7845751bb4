"""The language lint finds words in texts and names, and lets a count fall but not rise."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(name="lint")
def _lint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("lint_language")


def found_in(lint: ModuleType, source: str, path: str = "src/caramba/layer/x.py") -> list[tuple[int, str]]:
    return [(item.line, item.word) for item in lint.check_python(lint.Words(), path, source)]


def test_words_in_comment_docstring_and_message_are_found(lint: ModuleType) -> None:
    source = '"""Reads what lies there."""\n\nx = 1  # whoever asks\nraise ValueError(f"{x} goes on")\n'
    assert sorted(found_in(lint, source)) == [(1, "lies"), (3, "whoever"), (4, "goes on")]


def test_standard_terms_and_keys_are_not_found(lint: ModuleType) -> None:
    source = '"""Report held-out loss, and always apply rotary embedding."""\nkey = {"beside": 1}\n'
    assert found_in(lint, source) == []


def test_names_of_files_functions_and_classes_are_found(lint: ModuleType) -> None:
    source = "class HeldOut:\n    def is_few(self): ...\n"
    words = [word for _, word in found_in(lint, source, "src/caramba/layer/few_rows.py")]
    assert words == ["few_rows", "HeldOut", "is_few"]


def test_long_first_sentence_of_a_public_docstring_is_found(lint: ModuleType) -> None:
    long, short = " ".join(["word"] * 21), " ".join(["word"] * 20)
    assert found_in(lint, f'def run():\n    """{short}. {long}."""\n') == []
    assert found_in(lint, f'def run():\n    """{long}."""\n') == [(1, "run: 21 words")]
    assert found_in(lint, f'def _run():\n    """{long}."""\n') == []


def test_compare_count_above_ceiling_fails(lint: ModuleType) -> None:
    ceilings = {"src/caramba/layer": 2}
    assert lint.compare(Counter({"src/caramba/layer": 2}), ceilings) == []
    assert "at most 2" in lint.compare(Counter({"src/caramba/layer": 3}), ceilings)[0]


def test_compare_renamed_package_keeps_the_old_allowance(lint: ModuleType) -> None:
    ceilings = {"src/caramba/before": 5}
    assert lint.compare(Counter({"src/caramba/after": 5}), ceilings) == []
    assert "at most 5" in lint.compare(Counter({"src/caramba/after": 6}), ceilings)[0]


def test_lower_ceilings_never_raises_one(lint: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "ceilings.json"
    for counts in ({"a": 3, "b": 1}, {"a": 2, "b": 4, "c": 7}):
        lint.lower_ceilings("language", counts, file=file)
    assert json.loads(file.read_text()) == {"language": {"a": 2, "b": 1, "c": 7}}


def test_exception_without_a_reason_is_refused(lint: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "language.toml"
    file.write_text('[texts]\n[names]\n[[exceptions]]\nword = "way"\npath = "src"\n')
    with pytest.raises(ValueError, match="expected word, path and reason"):
        lint.Words(file)
