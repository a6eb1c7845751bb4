"""`plugins`: modules of a person's own, whose schema classes are types of a topology while their manifest is read."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import keyword
from collections.abc import Sequence
from pathlib import Path as File
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, model_validator

from caramba.config.base import Config
from caramba.config.extension import NodeConfig, type_of, types_kept
from caramba.config.parse import parse_as
from caramba.config.plugin_import import check_folder, holds, import_module, root_of
from caramba.config.plugin_types import check_types, schemas_of
from caramba.config.source import Path, SourceMap, format_place, is_mapping, is_sequence, mapping_of
from caramba.errors import ConfigError, quote

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
        raise ValueError(
            f"{quote(name)} is not the name of a module; write it as Python imports it, such as {known}"
        )
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


def use_plugins(
    data: Any, *, source: SourceMap | None = None, is_typed: bool = False
) -> list[dict[str, Any]]:
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
            where: Path = ("plugins", index)
            raise ConfigError(
                f"plugins[{index}]={plugin.module}: {error}{format_place(where, source)}"
            ) from error.__cause__
    try:
        activate(found)
    except ConfigError as error:
        raise ConfigError(f"{error}{format_place(('plugins',), source)}") from None
    return [plugin.model_dump(mode="json") for plugin in found]


_known: dict[str, dict[str, type[NodeConfig]]] = {}


def _module_of(name: str) -> str:
    """Return the module behind the name of an entry point of an installed package; any other name is a module's."""
    if "." in name or holds(File.cwd(), name) or importlib.util.find_spec(name) is not None:
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
