"""Finding and importing a plugin's module as `python -m` would: from the current folder first, then as installed."""

from __future__ import annotations

import contextlib
import importlib
import site
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from caramba.config.extension import shown, user_traceback
from caramba.errors import ConfigError


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


def import_module(name: str, folder: str | None) -> ModuleType:
    """Import a module from `folder`, else from the current folder, else as installed.

    What it prints goes to the standard error: the standard output is that of the command. The folder stays on the
    search path, for what the module imports later, such as the target of a layer.

    Raises:
        ConfigError: there is no such module, it fails, or another one of its name is loaded already.
    """
    top = name.partition(".")[0]
    given = None if folder is None else Path(folder).expanduser().absolute()
    if given is not None and holds(given, top):
        start: Path | None = given
    else:  # under -P, as python -m, not from the current folder
        start = None if sys.flags.safe_path else Path.cwd()
    if start is not None:
        _put_first(start)
    importlib.invalidate_caches()
    _refuse_other(name, start)
    load_from_source(top, start if start is not None and holds(start, top) else None)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(name)
        # That of an editable installation, where targets may be next to it.
        load_from_source(top, root_of(module))
        return module
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(f"{missing}."):
            places = "is not in " + " or ".join(
                str(place) for place in dict.fromkeys((given, start)) if place
            )
            raise ConfigError(
                f"there is no module {missing}: it {places}, and not among installed packages; start the command in "
                "the folder that holds it, install it, or correct the name"
            ) from error
        raise _failed(error) from error
    except (Exception, SystemExit) as error:
        raise _failed(error) from error


def check_folder(name: str, folder: str) -> None:
    """Refuse a folder that does not hold a module or its package.

    Raises:
        ConfigError: naming both.
    """
    path, top = Path(folder).expanduser().absolute(), name.partition(".")[0]
    if not holds(path, top):
        raise ConfigError(
            f"folder={folder} has no {top}.py and no package {top}; give the folder that holds it, or leave folder out"
        )


def _failed(error: BaseException) -> ConfigError:
    return ConfigError(f"cannot be imported: {user_traceback(error)}; mend it, or remove it from plugins")


def _put_first(folder: Path) -> None:
    """Have a folder searched before all others, as that of `python -m` is."""
    text = str(folder)
    if text in sys.path[:1]:
        return
    if text in sys.path:
        sys.path.remove(text)
    sys.path.insert(0, text)


def _refuse_other(name: str, start: Path | None) -> None:
    """Refuse a module whose name another file has taken: of the standard library, or of another folder's manifest."""
    top = name.partition(".")[0]
    loaded = sys.modules.get(top)
    if loaded is None or start is None or not holds(start, top):
        return
    root = root_of(loaded, keeps_installed=True)
    file = getattr(loaded, "__file__", None)
    if root is None and file is not None:  # mapped by its installation
        root = Path(file).parent
    if top in sys.builtin_module_names or (root is not None and root.resolve() != start.resolve()):
        other = "Python's own" if file is None else shown(file)
        raise ConfigError(f"{start} has a {top}, and {other} of the same name is loaded; rename yours")


def root_of(module: ModuleType, *, keeps_installed: bool = False) -> Path | None:
    """Return the folder from which a module's dotted name leads to its file.

    None of a module without a file, of one that an installation maps to a folder of another name, and, unless
    `keeps_installed`, of any that is installed: every process of the same Python finds those.
    """
    places: list[str | None] = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    if not places[0]:
        return None
    path = Path(places[0]).absolute()
    depth = module.__name__.count(".")
    if len(path.parents) <= depth:
        return None
    root = path.parents[depth]
    if root.joinpath(*module.__name__.split(".")) != path.with_name(path.name.partition(".")[0]):
        return None
    return None if not keeps_installed and is_installed(root) else root


def is_installed(folder: Path) -> bool:
    """Whether a folder is one of those that this Python looks for packages in by itself."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own += [*site.getsitepackages(), site.getusersitepackages()]
    paths = [Path(path) for path in own if path]
    return any(folder == path or folder.resolve() == path.resolve() for path in paths)
