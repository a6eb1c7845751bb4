"""What a run starts from: its frozen manifest, and its other inputs by content hash; a resume must read the same."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from caramba.errors import CheckpointError, ConfigError, DataError
from caramba.runs.files import sha256_of, write_json

if TYPE_CHECKING:
    from caramba.config.manifest import Manifest
    from caramba.config.plugins import PluginSource


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


SOURCES = "sources.json"
DATA = "data"
PLUGIN = "plugin "
_imported: WeakKeyDictionary[ModuleType, str] = WeakKeyDictionary()
"""Of each plugin's module in this process, what its source was for the first run: a module is imported once."""


def check_source(run_dir: Path, what: str, place: str, identity: str) -> None:
    """Note what a run reads under the name `what`, or hold it against the note once the run has begun.

    Phases before an interrupt and after it would otherwise learn from two teachers or texts, and the tables compare
    what was measured on either. Only the content counts: the same files may have moved.

    Args:
        what: `data`, or the role of a model, `teacher` or `student`.
        place: where it was found, for the message.
        identity: a hash of the content.

    Raises:
        CheckpointError, DataError: the run began with other weights or other data.
    """
    before = read_notes(run_dir).get(what)
    if before is not None and before["identity"] != identity and has_begun(run_dir):
        kind = "data" if what == DATA else f"{what}'s weights"
        error = DataError if what == DATA else CheckpointError
        raise error(
            f"{run_dir}: the {kind} in {place} have changed since this run began: SHA-256 {before['identity'][:12]} "
            f"(of {before['place']}), now {identity[:12]}; what is on record came from the former. Put them back and "
            "resume, or start a new run (resume=never)"
        )
    note(run_dir, what, {"place": place, "identity": identity})


def check_plugins(run_dir: Path, manifest: Manifest) -> None:
    """Record the SHA-256 of every plugin source file; once the run has begun, check the files against the record.

    Changed layers would otherwise run with weights of the earlier ones.

    Raises:
        ConfigError: the run began with other source, naming the files; or the source is no longer what a run before
            in this process was given.
    """
    for plugin in manifest.plugins:
        source = _read_source(plugin.module)
        changed = list(_changed(read_notes(run_dir).get(PLUGIN + plugin.module), source))
        if changed and has_begun(run_dir):
            raise ConfigError(
                f"{run_dir}: the plugin {plugin.module} in {source.file} has changed since this run began: "
                f"{'; '.join(changed)}; what is on record was computed by the former. Put it back and resume, or start "
                "a new run (resume=never)"
            )
        imported = _imported.setdefault(sys.modules[plugin.module], source.identity)
        if imported != source.identity:
            raise ConfigError(
                f"the plugin {plugin.module} in {source.file} has changed since this command imported it: SHA-256 "
                f"{imported[:12]}, now {source.identity[:12]}; start the command again"
            )
        entry = {"place": source.file, "identity": source.identity, "files": source.files}
        note(run_dir, PLUGIN + plugin.module, entry | ({"version": source.version} if source.version else {}))


def plugin_changes(run_dir: Path, manifest: Manifest) -> Iterator[str]:
    """Yield what differs in the source of each plugin from what a run began with."""
    known = read_notes(run_dir)
    for plugin in manifest.plugins:
        changed = list(_changed(known.get(PLUGIN + plugin.module), _read_source(plugin.module)))
        if changed:
            yield f"plugin {plugin.module}: {'; '.join(changed)}"


def plugin_sources(run_dir: Path) -> dict[str, str]:
    """Return each recorded plugin's short source SHA-256, by `source of MODULE`, without imports."""
    return {f"source of {module}": identity[:12] for module, identity in _plugins_of(run_dir).items()}


def _plugins_of(run_dir: Path) -> dict[str, str]:
    return {
        what.removeprefix(PLUGIN): entry["identity"]
        for what, entry in read_notes(run_dir).items()
        if what.startswith(PLUGIN)
    }


def check_plugins_match(runs: Iterable[tuple[Path, Callable[[], Manifest]]]) -> None:
    """Hold what a sweep's runs noted of their plugins against the source that is here now: the points to come would be
    of another layer than those that ran, and those that have finished would stand for it.

    Args:
        runs: each run with what reads its manifest, which is only done where a module is not imported yet.

    Raises:
        ConfigError: a run that has begun had other source, naming the files.
    """
    now: dict[str, str] = {}
    for run_dir, read in runs:
        then = _plugins_of(run_dir)
        if not then or not has_begun(run_dir):
            continue
        if not then.keys() <= now.keys():
            now |= {plugin.module: _read_source(plugin.module).identity for plugin in read().plugins}
        changed = "; ".join(plugin_changes(run_dir, read())) if then.items() - now.items() else ""
        if changed:
            raise ConfigError(
                f"the source of plugins has changed since {run_dir} of this sweep began: "
                f"{changed}; its points would be of either. Put it back and resume, "
                "or start a new sweep (the same command with resume=never)"
            )


def _read_source(module: str) -> PluginSource:
    from caramba.config.plugins import (
        read_source,  # with pydantic, which commands over many runs do not need
    )

    return read_source(module)


def _changed(before: dict[str, Any] | None, source: PluginSource) -> Iterator[str]:
    """Yield each file whose content is another than was noted, was not noted, or is gone."""
    if before is None or before["identity"] == source.identity:
        return
    then: dict[str, str] = before["files"]
    if not then:  # of a version that did not find the files of a package under another folder's name
        return
    for name in sorted({*then, *source.files}):
        one, two = then.get(name), source.files.get(name)
        if one != two:
            yield f"{name} SHA-256 {'absent' if one is None else one[:12]}, now {'absent' if two is None else two[:12]}"


def read_notes(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Return what a run has noted so far, by what it is."""
    file = run_dir / SOURCES
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def note(run_dir: Path, what: str, entry: dict[str, Any]) -> None:
    """Note something, in place of what was noted of it."""
    known = read_notes(run_dir)
    if known.get(what) != entry:
        write_json(run_dir / SOURCES, known | {what: entry})


def has_begun(run_dir: Path) -> bool:
    """Whether a stage is on record or a phase was planned: before that nothing came of what was read."""
    folders = (run_dir, *run_dir.glob("groups/*"))
    return any((folder / "plan.json").is_file() or any(folder.glob("stages/*.json")) for folder in folders)


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
    changed = _changed_keys(before["keys"], now) if before is not None else []
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


def _changed_keys(then: dict[str, str], now: dict[str, str]) -> list[str]:
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
