"""The frozen manifest of a run: its canonical bytes, its hash, and reading it back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from caramba.errors import ConfigError

if TYPE_CHECKING:
    from caramba.config.manifest import Manifest

MANIFEST, OVERRIDES = "manifest.json", "overrides.txt"


def read_overrides(run_dir: Path) -> tuple[str, ...]:
    """Return the words of the command line that made a run, none where it has no such file."""
    file = run_dir / OVERRIDES
    return tuple(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else ()


def canonical_json(manifest: Manifest) -> str:
    """Return the one text that a manifest has on disk: indented JSON with sorted keys."""
    plain = manifest.model_dump(mode="json")
    return json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def manifest_sha256(manifest: Manifest) -> str:
    """Return the hexadecimal SHA-256 of the canonical text, which is that of the file manifest.json."""
    return hashlib.sha256(canonical_json(manifest).encode()).hexdigest()


def experiment_sha256(manifest: Manifest) -> str:
    """Return the hash of what a manifest computes: how it is launched and resumed is left out."""
    return _experiment_sha256(manifest.model_dump(mode="json"))


def experiment_of(run_dir: Path) -> str | None:
    """Return that hash of a run directory's manifest, which may be of another version's schema; None of no JSON."""
    try:
        plain = json.loads((run_dir / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return _experiment_sha256(plain) if isinstance(plain, dict) else None


def _experiment_sha256(plain: dict[str, Any]) -> str:
    kept = {key: value for key, value in plain.items() if key not in ("launcher", "cluster", "resume")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def read_manifest(run_dir: Path) -> Manifest:
    """Read the manifest of a run directory, or a manifest.json given by its own path.

    Raises:
        ConfigError: no such file, no JSON, or content that this version's schema does not accept.
    """
    from caramba.config.manifest import (
        parse_manifest,  # with pydantic, which commands over many runs do not need
    )

    file = run_dir if run_dir.suffix == ".json" else run_dir / MANIFEST
    try:
        plain = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot read the manifest of a run: {error.strerror}; give a run directory"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}); the file was changed or cut short") from None
    try:
        return parse_manifest(plain)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def differences(first: Any, second: Any, path: str = "") -> Iterator[str]:
    """Yield `key: old -> new` for every leaf in which two plain values differ."""
    if isinstance(first, dict) and isinstance(second, dict):
        for key in sorted({*first, *second}):
            yield from differences(first.get(key), second.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, (one, other) in enumerate(zip(first, second, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif first != second:
        yield f"{path}: {_short(first)} -> {_short(second)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"
