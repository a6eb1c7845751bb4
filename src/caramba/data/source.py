"""Texts of a plugin: opened, checked as they are read, and identified by their keys and source code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from caramba.config.extension import DataSourceConfig, build_extension, user_traceback
from caramba.config.plugins import read_source
from caramba.errors import DataError, ExtensionFailedError


def open_source(config: DataSourceConfig) -> Callable[[str], Iterator[str]]:
    """Return a function that yields the texts of a split, from the beginning at each call.

    Raises:
        ConfigError: the target is not of its kind.
    """
    made = build_extension(config, config)
    return lambda split: _texts(config, made, split)


def source_identity(config: DataSourceConfig) -> dict[str, str]:
    """Return what tells one source from another: its type, its keys, and the SHA-256 of its code."""
    schema = type(config).__module__
    keys = json.dumps(config.model_dump(mode="json"), sort_keys=True)
    return {"source": config.type, "keys": keys, "code": read_source(schema).identity}


def _texts(config: DataSourceConfig, made: Any, split: str) -> Iterator[str]:
    where = f"{config.key} ({config.type})"
    n_texts = 0
    try:
        for text in made.texts(split):
            if not isinstance(text, str):
                raise DataError(f"{where}: texts({split!r}) yields {type(text).__name__}, expected text")
            n_texts += 1
            yield text
    except DataError:
        raise
    except Exception as error:
        raise ExtensionFailedError(f"{where}: texts({split!r}) failed: {user_traceback(error)}") from error
    if not n_texts:
        raise DataError(f"{where}: texts({split!r}) yields nothing; expected documents of both splits")
