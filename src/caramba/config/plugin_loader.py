"""Importing user modules from their source, never from cached bytecode.

Python takes kept bytecode for that of a source file of the same size and second. Of two versions of a layer that were
copied with their times, or edited within a second, the former would run under the SHA-256 of the latter.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType


class _FromSource(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _OwnModules(MetaPathFinder):
    """Finds modules as Python does, those in `folders` and of the packages `tops` with a loader that reads source.

    Files deeper in a folder than its modules and packages are not part of them.
    """

    def __init__(self) -> None:
        self.folders: set[Path] = set()
        self.tops: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = fullname.partition(".")[0]
        if top not in self.tops and not any(holds(folder, top) for folder in self.folders):
            return None
        others = (getattr(finder, "find_spec", None) for finder in list(sys.meta_path) if finder is not self)
        found = (find(fullname, path, target) for find in others if find is not None)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is None or type(spec.loader) is not SourceFileLoader:
            return spec
        file = Path(spec.loader.path)
        # An environment in the folder holds packages of others.
        in_folder = any(
            file == folder / f"{top}.py" or file.is_relative_to(folder / top) for folder in self.folders
        )
        if top in self.tops or in_folder:
            spec.loader = _FromSource(spec.loader.name, spec.loader.path)
        return spec


_own = _OwnModules()


def load_from_source(top: str, folder: Path | None) -> None:
    """From now on import a package, and all modules in a folder, from source."""
    _own.tops.add(top)
    if folder is not None:
        _own.folders.add(folder)
    if _own not in sys.meta_path:
        sys.meta_path.insert(0, _own)


def holds(folder: Path, top: str) -> bool:
    """Whether a folder has a module or package of that name."""
    return PathFinder.find_spec(top, [str(folder)]) is not None
