"""`plugins`: modules of a person's own, whose schema classes are types of a topology while their manifest is read."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import keyword
import re
import site
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from caramba.config.base import Config
from caramba.config.extension import (
    KINDS,
    ExtensionConfig,
    NodeConfig,
    is_own,
    shown,
    type_of,
    types_kept,
    user_traceback,
)
from caramba.config.layer_base import Decoding, LayerConfig
from caramba.config.parse import parse_as
from caramba.config.source import SourceMap, format_place, is_mapping, is_sequence, mapping_of
from caramba.config.topology import TopologyConfig
from caramba.errors import ConfigError, nearest, quote


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
        in_folder = any(file == folder / f"{top}.py" or file.is_relative_to(folder / top) for folder in self.folders)
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
            places = "is not in " + " or ".join(str(place) for place in dict.fromkeys((given, start)) if place)
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


_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def check_target(schema: type[NodeConfig], place: str) -> None:
    """Check that the module of a target exists and that its source defines the class.

    Whether that is a torch module is known for sure when it is imported, with the model; what cannot be one, a
    function, a value, a class without a base, is refused here.

    Raises:
        ConfigError: naming the target, and the nearest name where there is one.
    """
    target: Any = schema.target
    name = f"{schema.__name__}.target={target!r}"
    if not isinstance(target, str) or not _TARGET.fullmatch(target):
        raise ConfigError(f"{name} is not 'module:Class', such as 'my_pkg.layers_impl:MyLayer' ({place})")
    module, _, wanted = target.partition(":")
    _read_own_source(module.partition(".")[0])
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        spec = None
    except Exception as error:  # a package that the module is in runs when it is looked for
        raise ConfigError(f"{name}: {module} cannot be looked for: {user_traceback(error)} ({place})") from error
    if spec is None:
        raise ConfigError(f"{name}: there is no module {module}; correct the target ({place})")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return  # compiled: there is no source to read
    file = Path(spec.origin)
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{name}: {shown(file)} is not Python: {user_traceback(error)} ({place})") from error
    names = _names(tree.body)
    if "*" in names and wanted not in names:
        return
    if wanted not in names:
        raise ConfigError(
            f"{name}: {shown(file)} has no {wanted}{nearest(wanted, names) or ';'} correct the target ({place})"
        )
    found = names[wanted]
    if issubclass(schema, ExtensionConfig):
        problem = _signature_problem(found, schema)
        if problem is not None:
            raise ConfigError(
                f"{name} {problem} ({shown(file)}:{found.lineno}); expected {schema.signature()} ({place})"
            )
        return
    if isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) or _has_no_base(found):
        what = "a class without a base" if isinstance(found, ast.ClassDef) else "a function"
        raise ConfigError(
            f"{name} is {what} ({shown(file)}:{found.lineno}), expected a subclass of torch.nn.Module ({place})"
        )


def _signature_problem(node: ast.stmt, schema: type[ExtensionConfig]) -> str | None:
    """Return how the source of an extension's target differs from its kind; methods of other files are not read."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return "is a function"
    if not isinstance(node, ast.ClassDef):
        return None
    if schema.base is not None and _has_no_base(node):
        return "is a class without a base"
    own = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    for method, wanted in schema.methods.items():
        if method in own:
            arguments = own[method].args
            given = [item.arg for item in (*arguments.posonlyargs, *arguments.args)][1:]
            required = len(given) - len(arguments.defaults)
            if (len(given) < len(wanted) and arguments.vararg is None) or required > len(wanted):
                return f"has {method}({', '.join(('self', *given))})"
        elif not node.bases and not node.decorator_list:
            return f"has no {method}"
    return None


def _read_own_source(top: str) -> None:
    """Have a target's package read from source as its schema's is, unless it is another one that is installed."""
    with contextlib.suppress(ImportError, ValueError):  # which the search for the target tells
        spec = importlib.util.find_spec(top)
        if spec is None or spec.origin is None:
            return
        if not any(is_installed(folder) for folder in Path(spec.origin).parents):
            load_from_source(top, None)


def _has_no_base(node: ast.stmt) -> bool:
    if not isinstance(node, ast.ClassDef) or node.decorator_list or node.keywords:
        return False
    return all(isinstance(base, ast.Name) and base.id == "object" for base in node.bases)


def _names(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """Return what a module's statements bind, by name; `*` where an import brings names that only it knows."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(item.asname or item.name).partition(".")[0]: node for item in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {item.id: node for target in targets for item in ast.walk(target) if isinstance(item, ast.Name)}
        elif isinstance(node, ast.If | ast.Try | ast.With):
            parts = [node.body, getattr(node, "orelse", []), getattr(node, "finalbody", [])]
            parts += [handler.body for handler in getattr(node, "handlers", [])]
            for part in parts:
                found |= _names(part)
    return found


def schemas_of(module: ModuleType) -> list[type[NodeConfig]]:
    """Return the schema classes that a module or package defines, and those of others that it imports by name."""
    name = module.__name__
    found = {
        schema: None
        for schema in _subclasses(NodeConfig)
        if is_own(schema) and _is_of(schema.__module__, name) and _is_live(schema)
    }
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, NodeConfig) and is_own(value):
            found[value] = None
    return list(found)


def check_types(module: ModuleType, schemas: list[type[NodeConfig]]) -> None:
    """Check the schema classes of a plugin.

    Raises:
        ConfigError: there is none, or one that cannot be used, with its file and line and what to change.
    """
    for schema in schemas:
        problem = _problem(schema)
        if problem is not None:
            raise ConfigError(f"{schema.__name__} {problem} ({place_of(schema)})")
    known = {type_of(schema): schema for schema in NodeConfig.registry.values() if not is_own(schema)}
    named: dict[str, type[NodeConfig]] = {}
    for schema in schemas:
        if "target" not in schema.__dict__:
            continue
        kind = type_of(schema)
        other = known.get(kind) or named.get(kind)
        if other is not None:
            theirs = f"{other.__module__}.{other.__name__}"
            raise ConfigError(
                f"{schema.__name__} answers to type {kind!r}, which {theirs} does already; rename the class and its "
                f"type ({place_of(schema)})"
            )
        named[kind] = schema
        check_target(schema, place_of(schema))
    if not named:
        file = getattr(module, "__file__", None)
        what = shown(file) if file else f"{next(iter(module.__path__))}, a folder without __init__.py,"
        raise ConfigError(
            f"adds no layer or extension: {what} has no subclass of caramba.config.LayerConfig or of "
            f"{', '.join(kind.__name__ for kind in KINDS)}; name the module that has the schema classes, or import "
            "them in this one"
        )


def place_of(schema: type) -> str:
    """Return file and line of a class."""
    file = inspect.getsourcefile(schema) or schema.__module__
    try:
        return f"{shown(file)}:{inspect.getsourcelines(schema)[1]}"
    except (OSError, TypeError):  # no source is there to be read
        return shown(file)


def _problem(schema: type[NodeConfig]) -> str | None:
    if issubclass(schema, TopologyConfig):
        return "is a topology, and plugins add layers; subclass caramba.config.LayerConfig"
    if issubclass(schema, ExtensionConfig):
        return _extension_problem(schema)
    if not issubclass(schema, LayerConfig):
        return "is no layer's schema; subclass caramba.config.LayerConfig"
    built_in = next((base for base in schema.__mro__ if "target" in base.__dict__ and not is_own(base)), None)
    if built_in is not None:
        return (
            f"is made from {built_in.__name__}, which caramba treats as its own layer wherever it meets one; subclass "
            "LayerConfig itself"
        )
    if "target" not in schema.__dict__:
        if any("target" in below.__dict__ for below in _subclasses(schema)):
            return None  # a base of the person's own layers
        return 'has no target of its own; add target = "module:Class", the torch module that it builds'
    return _type_problem(schema) or _method_problem(schema)


def _extension_problem(schema: type[ExtensionConfig]) -> str | None:
    kind = next((kind for kind in KINDS if issubclass(schema, kind)), None)
    if kind is None:
        return f"is of no kind; subclass one of {', '.join(kind.__name__ for kind in KINDS)} of caramba.config"
    if "target" not in schema.__dict__:
        if any("target" in below.__dict__ for below in _subclasses(schema)):
            return None
        return f'has no target; add target = "module:Class", with {kind.signature()}'
    return _type_problem(schema)


def _type_problem(schema: type[NodeConfig]) -> str | None:
    kind = type_of(schema)
    annotation = schema.model_fields["type"].annotation
    if get_origin(annotation) is not Literal or get_args(annotation) != (kind,):
        return f'needs its type by name; add type: Literal["{kind}"] = "{kind}"'
    return None


def _method_problem(schema: type[LayerConfig]) -> str | None:
    if schema.parameter_shapes is LayerConfig.parameter_shapes:
        return (
            "does not define parameter_shapes(), so its weights would count as none; return the shape of each by name, "
            'such as {"weight": (self.d_model, self.d_model)}, or {} where it has none'
        )
    if schema.infer is LayerConfig.infer and "d_model" not in schema.model_fields:
        return "has no field d_model and does not define infer(width), so no width can be checked; add one of them"
    if schema.decoding not in get_args(Decoding):
        return f"has decoding = {schema.decoding!r}; expected one of {', '.join(get_args(Decoding))}"
    has_streams = schema.cached_streams is not LayerConfig.cached_streams
    if (schema.decoding == "cached") != has_streams:
        return (
            'has decoding = "cached" and does not define cached_streams(); return (name, heads, width) of what it '
            "keeps of every token"
            if schema.decoding == "cached"
            else f'defines cached_streams() with decoding = {schema.decoding!r}; set decoding = "cached", or remove it'
        )
    return None


def _subclasses(base: type[NodeConfig]) -> Iterator[type[NodeConfig]]:
    for schema in base.__subclasses__():
        yield schema
        yield from _subclasses(schema)


def _is_of(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _is_live(schema: type) -> bool:
    """Whether a class is what its module has under its name: one of an import that failed waits to be cleared away."""
    return vars(sys.modules.get(schema.__module__, schema)).get(schema.__name__) is schema


COMPILED = (".so", ".pyd", ".pyc")  # the last without a source next to it


@dataclass(frozen=True)
class PluginSource:
    """What a plugin is made of: its file, the SHA-256 of each of its source files by path below the folder that holds
    it, and its version where it is an installed distribution."""

    module: str
    file: str
    files: dict[str, str]
    version: str | None = None

    @property
    def identity(self) -> str:
        """One SHA-256 of all files, wherever the folder is."""
        text = "".join(f"{digest}  {name}\n" for name, digest in sorted(self.files.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def read_source(name: str) -> PluginSource:
    """Read the source of a plugin that is imported. Nothing is imported for it.

    Modules are followed through their import statements, at any depth of them, if they are next to the plugin:
    in the same folder, or, of an installed one, in the same package.
    """
    module = sys.modules[name]
    root = root_of(module, keeps_installed=True)
    file = str(getattr(module, "__file__", ""))
    if root is None and not file:
        return PluginSource(name, file, {})
    is_installed = root_of(module) is None
    schemas = [schema for schema in schemas_of(module) if "target" in schema.__dict__]
    begin = [name, *(schema.__module__ for schema in schemas), *_targets(schemas)]
    tops = {item.partition(".")[0] for item in begin} if is_installed else None
    files = {
        where: hashlib.sha256(path.read_bytes()).hexdigest() for where, path in _closure(root, begin, tops).items()
    }
    return PluginSource(name, file, files, _version(name) if is_installed else None)


def _targets(schemas: list[type[NodeConfig]]) -> list[str]:
    return [schema.target.partition(":")[0] for schema in schemas]


def _closure(root: Path | None, begin: list[str], tops: set[str] | None) -> dict[str, Path]:
    """Return the files of modules and of all that they import from their folder, by their path below `root`.

    With `tops` of these packages alone. Paths follow modules if an installation maps these to folders of other names.
    """
    found: dict[str, Path] = {}
    pending = list(begin)
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        top = name.partition(".")[0]
        if name in seen or top == "caramba" or (tops is not None and top not in tops):
            continue
        seen.add(name)
        parts = name.split(".")
        pending.extend(".".join(parts[:depth]) for depth in range(1, len(parts)))  # packages run first
        path = _file(_mapped(parts) if root is None else root.joinpath(*parts))
        if path is None:
            continue
        found["/".join(parts) + _end(path) if root is None else path.relative_to(root).as_posix()] = path
        if path.suffix == ".py":
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            pending.extend(_imports(path, package))
    return found


def _mapped(parts: list[str]) -> Path | None:
    """Return the path of a module by the nearest package above it that is loaded, or by itself; its file may not be."""
    for depth in range(len(parts), 0, -1):
        places = [*getattr(sys.modules.get(".".join(parts[:depth])), "__path__", ())]
        if places:
            return Path(places[0]).joinpath(*parts[depth:])
    file = getattr(sys.modules.get(parts[0]), "__file__", None) if len(parts) == 1 else None
    return None if file is None else Path(file).with_suffix("")


def _end(path: Path) -> str:
    return f"/{path.name}" if path.name == "__init__.py" else path.name[path.name.index(".") :]


def _file(place: Path | None) -> Path | None:
    if place is None:
        return None
    for path in (place / "__init__.py", place.with_name(f"{place.name}.py")):
        if path.is_file():
            return path
    beside = sorted(place.parent.glob(f"{place.name}.*")) if place.parent.is_dir() else []
    return next((path for path in beside if path.suffix in COMPILED), None)


def _imports(path: Path, package: str) -> Iterator[str]:
    """Yield the modules that a file imports, those inside of functions too; a name of one may be a module or not."""
    for node in ast.walk(ast.parse(path.read_bytes(), filename=str(path))):
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1] if package else []
                base = ".".join([*above, *([base] if base else [])])
            if base:
                yield base
                yield from (f"{base}.{item.name}" for item in node.names if item.name != "*")


def _version(name: str) -> str | None:
    owners = importlib.metadata.packages_distributions().get(name.partition(".")[0], [])
    return importlib.metadata.version(owners[0]) if owners else None


ENTRY_POINTS = "caramba.plugins"
"""The group of entry points by which installed packages give plugins short names."""


def _dotted(name: str) -> str:
    parts = name.split(".")
    if not all(part.isidentifier() and not keyword.iskeyword(part) for part in parts):
        folder, _, last = name.removesuffix(".py").replace("\\", "/").rstrip("/").rpartition("/")
        if (folder == ".." or folder.startswith(("../", "/", "~"))) and last.isidentifier():
            raise ValueError(
                f"{quote(name)} is a path, and not the name of a module; write {{module: {last}, folder: {folder}}}, "
                f"or {last} and start the command in {folder}"
            )
        hint = name.removesuffix(".py").strip("./\\").replace("/", ".").replace("\\", ".").replace("-", "_")
        known = hint if hint and all(part.isidentifier() for part in hint.split(".")) else "my_pkg.layers"
        raise ValueError(f"{quote(name)} is not the name of a module; write it as Python imports it, such as {known}")
    if parts[0] == "caramba":
        raise ValueError(
            f"{quote(name)} is a part of caramba, whose types are known already; name a module of your own"
        )
    return name


ModuleName = Annotated[str, AfterValidator(_dotted)]


class PluginConfig(Config):
    """A module that adds layers. A launch notes the folder that it was found in, where workers look for it too."""

    module: ModuleName = Field(description="name of the Python module")
    folder: str | None = Field(
        default=None,
        description="the folder that holds the module or its package; of an installed package none",
    )


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {"module": value}
    if is_mapping(value) or isinstance(value, PluginConfig):
        return value
    raise ValueError(f"expected the name of a module, got {quote(value)}")


_ENTRY_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"module": {"type": "string"}, "folder": {"type": ["string", "null"]}},
            "required": ["module"],
            "additionalProperties": False,
        },
    ]
}


def _listed(value: Any) -> Any:
    if is_sequence(value):
        return value
    example = value if isinstance(value, str) and value else "my_pkg.layers"
    got = repr(value) if isinstance(value, str) else "a mapping" if is_mapping(value) else str(value)
    raise ValueError(f"expected a list of modules, got {got}; write plugins=[{example}]")


Plugins = Annotated[
    tuple[Annotated[PluginConfig, BeforeValidator(_named), WithJsonSchema(_ENTRY_SCHEMA)], ...],
    BeforeValidator(_listed),
]


class PluginSection(Config):
    """The key `plugins` by itself: it is read before the rest, whose types it adds."""

    plugins: Plugins = Field(default=(), description="modules of your own that add layers and extensions")

    @model_validator(mode="after")
    def _once(self) -> PluginSection:
        names = [plugin.module for plugin in self.plugins]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"plugins={names} names {twice} twice; name each module once")
        return self


def use_plugins(data: Any, *, source: SourceMap | None = None, is_typed: bool = False) -> list[dict[str, Any]]:
    """Import the plugins that a manifest as plain data names, and make their types those of the manifest.

    Types of other plugins, which an earlier manifest brought into this process, are unknown from now on. Nothing is
    imported for a manifest whose origin is an agent.

    Args:
        source: where values were written.
        is_typed: whether a person wrote the folders, if any: they are to hold the modules then. Those of a frozen
            manifest may have moved since.

    Returns:
        the plugins as they are frozen: each module with the folder that it was found in.

    Raises:
        ConfigError: a manifest that may not name plugins, a name that is none, or a module that cannot be imported,
            adds no layer, or adds one that cannot be used; with the place where it was written.
    """
    tree = mapping_of(data) if is_mapping(data) else {}
    named = tree.get("plugins")
    if not named:
        activate(())
        if named is None or is_sequence(named):
            return []
    if tree.get("origin", "human") == "agent":
        raise ConfigError(
            f"plugins: a manifest whose origin is an agent may not name plugins{format_place(('plugins',), source)}; "
            "remove plugins"
        )
    section = parse_as(PluginSection, {"plugins": named}, source=source)
    found: list[PluginConfig] = []
    for index, plugin in enumerate(section.plugins):
        try:
            found.append(_imported(plugin, is_typed=is_typed))
        except ConfigError as error:
            where = format_place(("plugins", index), source)
            raise ConfigError(f"plugins[{index}]={plugin.module}: {error}{where}") from error.__cause__
    try:
        activate(found)
    except ConfigError as error:
        raise ConfigError(f"{error}{format_place(('plugins',), source)}") from None
    return [plugin.model_dump(mode="json") for plugin in found]


_known: dict[str, dict[str, type[NodeConfig]]] = {}


def _module_of(name: str) -> str:
    """Return the module behind the name of an entry point of an installed package; any other name is a module's."""
    if "." in name or holds(Path.cwd(), name) or importlib.util.find_spec(name) is not None:
        return name
    found = importlib.metadata.entry_points(group=ENTRY_POINTS, name=name)
    return next((point.module for point in found), name)


def _imported(plugin: PluginConfig, *, is_typed: bool) -> PluginConfig:
    """Import a plugin and check what it adds; return it with the folder that it is in."""
    if is_typed and plugin.folder is not None:
        check_folder(plugin.module, plugin.folder)
    with types_kept():
        plugin = plugin.model_copy(update={"module": _module_of(plugin.module)})
        module = import_module(plugin.module, plugin.folder)
        schemas = schemas_of(module)
    check_types(module, schemas)
    _known[plugin.module] = {type_of(schema): schema for schema in schemas if "target" in schema.__dict__}
    root = root_of(module)
    return PluginConfig(module=plugin.module, folder=None if root is None else str(root))


def activate(plugins: Sequence[PluginConfig]) -> None:
    """Make the types of imported plugins those that nodes may have, in addition to caramba's own.

    Raises:
        ConfigError: two of them answer to the same type.
    """
    for types in _known.values():
        for name, schema in types.items():
            if NodeConfig.registry.get(name) is schema:
                del NodeConfig.registry[name]
    owners: dict[str, str] = {}
    for plugin in plugins:
        name = plugin.module
        for kind, schema in _known[name].items():
            other = NodeConfig.registry.get(kind)
            if other is not None and other is not schema:
                raise ConfigError(
                    f"plugins: {name} and {owners.get(kind, other.__module__)} both have a layer of type {kind!r}; "
                    "rename the schema class and its type in one of them"
                )
            NodeConfig.registry[kind] = schema
            owners[kind] = name
