"""Integrity of manifest.json: it must not change after its run began."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from caramba.errors import ConfigError
from caramba.runs.files import sha256_of
from caramba.runs.manifest import MANIFEST
from caramba.runs.sources import has_begun, note, read_notes

HELD = "manifest"
# How a run is started and resumed, and what a person remarks, changes nothing of what it computes.
_HOW = {"launcher", "cluster", "resume", "notes"}
# Paths: they may change, and their content is checked separately.
_PLACES = {
    "model": ("path", "checkpoint"),
    "model.teacher": ("checkpoint",),
    "groups[].data": ("path", "val_path", "tokenizer_path"),
    "plugins[]": ("folder",),
}
# The depth at which changed keys are reported: those of a phase, else a section.
_DEEP, _DEEP_IN_GROUPS = 3, 6
_MINTED = re.compile(r"\d{8}-\d{6}-([0-9a-f]{8})(-\d+)?")


def check_manifest_unchanged(run_dir: Path) -> None:
    """Record the keys of manifest.json by content; once the run has begun, check them against the record.

    A run without a record is checked against the hash in the name of its folder.

    Raises:
        ConfigError: the file was changed, naming the keys, or both hashes where only they are known.
    """
    file = run_dir / MANIFEST
    plain = json.loads(file.read_text(encoding="utf-8"))
    now = dict(_digests(plain))
    before = read_notes(run_dir).get(HELD)
    changed = _changed(before["keys"], now) if before is not None else []
    if not has_begun(run_dir):
        pass
    elif changed:
        more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
        raise _refusal(file, f"{', '.join(changed[:5])}{more} {'differ' if len(changed) > 1 else 'differs'}")
    elif before is None and (minted := _MINTED.fullmatch(run_dir.name)) is not None:
        # An editor may have reformatted it.
        written = json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        found = sha256_of(file)
        if minted[1] not in (found[:8], hashlib.sha256(written.encode()).hexdigest()[:8]):
            raise _refusal(
                file,
                f"its SHA-256 begins with {found[:8]}, and the run was made with {minted[1]} (more is not known of a "
                "run of that version, so that any change counts)",
            )
    note(run_dir, HELD, {"place": str(file), "identity": _digest(now), "keys": now})


def _refusal(file: Path, what: str) -> ConfigError:
    return ConfigError(
        f"{file}: the manifest has changed since this run began: {what}; recorded results came from the former. "
        f"Restore it and resume, or start the changed manifest as a new run: caramba rerun {file.parent}"
    )


def _changed(then: dict[str, str], now: dict[str, str]) -> list[str]:
    return sorted(key for key in {*then, *now} if then.get(key) != now.get(key))


def _digests(value: Any, path: str = "", form: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield each key down to a depth with the digest of what it holds."""
    deep = _DEEP_IN_GROUPS if form.startswith("groups") else _DEEP
    if depth < deep and isinstance(value, dict) and value:
        left_out = _HOW if not depth else set(_PLACES.get(form, ()))
        for key in sorted(value.keys() - left_out):
            dot = "." if path else ""
            yield from _digests(value[key], f"{path}{dot}{key}", f"{form}{dot}{key}", depth + 1)
    elif depth < deep and isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _digests(item, f"{path}[{index}]", f"{form}[]", depth + 1)
    else:
        yield path, _digest(value)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
