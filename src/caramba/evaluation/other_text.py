"""Texts unlike those of the run, on which a student is compared with its teacher too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from caramba.console import logger
from caramba.data import IGNORED, TokenDataset, Tokenizer, Windows, open_benchmark_text, spread_windows
from caramba.data.corpus import collect_documents, stdlib_root
from caramba.errors import ConfigError

PYTHON, SPACED = "python", "spaced"
_VAL_FRAC = 0.05
_MARKS = re.compile(r"(\w)([^\w\s])|([^\w\s])(\w)")


def label_of(name: str) -> str:
    """Return the name of a text in the names of checks."""
    return re.sub(r"[^A-Za-z0-9]+", "_", Path(name).stem).strip("_").lower() or "text"


def check_other_texts(names: Iterable[str], tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """Return the texts that can be measured on; before a run trains.

    Without a tokenizer the two built-in texts are left out, with a warning.

    Raises:
        ConfigError: a path that does not exist.
    """
    found = []
    for name in names:
        if name in (PYTHON, SPACED):
            if tokenizer is None:
                logger.warning(
                    f"verify fidelity: text {name} is left out: the run's data does not say which tokenizer made it"
                )
                continue
        elif not Path(name).expanduser().exists():
            raise ConfigError(
                f"verify fidelity: texts: {name} does not exist; use python, spaced, a token folder or file, or a "
                "UTF-8 text file"
            )
        found.append(name)
    return tuple(found)


def open_other_text(
    name: str, own: Windows, tokenizer: Tokenizer | None, *, vocab_size: int, block_size: int, windows: int
) -> TokenDataset:
    """Return up to `windows` windows of another text, encoded with the run's tokenizer.

    `python` is held-out source of the standard library; `spaced` the run's own held-out text with spaces around
    punctuation, as in WikiText-2; anything else the path of a token folder, .npy or .tokens file, or UTF-8 text.

    Raises:
        ConfigError: no tokenizer, or a text that is missing or too short.
        DataError: tokens of another tokenizer.
    """
    path = Path(name).expanduser()
    if name not in (PYTHON, SPACED) and (path.is_dir() or path.suffix in (".npy", ".tokens")):
        opened = open_benchmark_text(path)
        opened.check(vocab_size, block_size, tokenizer)
        return TokenDataset(opened.tokens, block_size)
    if tokenizer is None:
        raise ConfigError(
            f"verify fidelity: texts: {name}: the run's data does not say which tokenizer made it; use a token folder "
            "(caramba prepare), or name tokens in `texts`"
        )
    wanted, found = windows * block_size + 1, 0
    parts: list[np.ndarray] = []
    for text in _documents(name, path, own, tokenizer):
        parts += tokenizer.encode_documents([text])
        found += len(parts[-1])
        if found >= wanted:
            break
    ids = np.concatenate(parts)[:wanted] if parts else np.zeros(0, np.int64)
    if len(ids) <= block_size:
        raise ConfigError(
            f"verify fidelity: texts: {name}: {len(ids)} tokens, one window needs {block_size + 1}; use a longer text "
            "or a smaller block_size"
        )
    return TokenDataset(ids, block_size)


def _documents(name: str, path: Path, own: Windows, tokenizer: Tokenizer) -> Iterable[str]:
    if name == PYTHON:
        return collect_documents(stdlib_root(), _VAL_FRAC).texts("val")
    if name == SPACED:
        return _spaced(own, tokenizer)
    try:
        return [path.read_text(encoding="utf-8")]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"verify fidelity: texts: {name}: {error}; use python, spaced, a token folder or a UTF-8 text file"
        ) from None


def _spaced(own: Windows, tokenizer: Tokenizer) -> Iterator[str]:
    for index in spread_windows(len(own), len(own)):
        targets = own[index][1]
        yield space_marks(tokenizer.decode(targets[targets != IGNORED].tolist()))


def space_marks(text: str) -> str:
    """Return the text with a space between a word and a mark of punctuation next to it."""
    twice = _MARKS.sub(r"\1\3 \2\4", text)  # a mark between two words touches both
    return _MARKS.sub(r"\1\3 \2\4", twice)
