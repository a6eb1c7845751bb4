"""The config groups on disk: which exist, their options, and what each YAML says about itself in its first line."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path


def conf_root() -> Path:
    """Return the folder of the groups that come with caramba."""
    spec = importlib.util.find_spec("caramba.conf")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def groups(config_dirs: Iterable[Path] = ()) -> dict[str, dict[str, Path]]:
    """Return every group with its options, as {group: {option: file}}, caramba's own before a user's."""
    found: dict[str, dict[str, Path]] = {}
    for root in (conf_root(), *config_dirs):
        for file in sorted(root.rglob("*.yaml")):
            relative = file.relative_to(root)
            if len(relative.parts) > 1:
                found.setdefault(relative.parent.as_posix(), {}).setdefault(file.stem, file)
    return found


def description(file: Path) -> str:
    """Return the first comment line of a YAML file (after a `# @package` line), which says what the option is."""
    with open(file, encoding="utf-8") as lines:
        for line in lines:
            text = line.strip()
            if text and not text.startswith("#"):
                break
            words = text.removeprefix("#").strip()
            if words and not words.startswith("@"):
                return words.rstrip(".")
    return ""


def config_file(config_path: str, config_dirs: Iterable[Path] = ()) -> Path | None:
    """Return the file that Hydra reads for `config_path`, such as `model/tiny`: the first on the search path."""
    for root in (conf_root(), *config_dirs):
        file = root / f"{config_path}.yaml"
        if file.is_file():
            return file
    return None


def show_file(file: Path) -> str:
    """Name a file for a person: `conf/…` for caramba's own, relative to the current folder where possible."""
    root = conf_root()
    if file.is_relative_to(root):
        return f"conf/{file.relative_to(root).as_posix()}"
    here = Path.cwd()
    return str(file.relative_to(here) if file.is_relative_to(here) else file)
