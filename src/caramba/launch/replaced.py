"""Refusal of a typed option whose list a later file of the composition replaces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path as File
from typing import Any

from caramba.config.source import Path
from caramba.errors import ConfigError
from caramba.launch.groups import show_file
from caramba.launch.locate import Origin
from caramba.launch.words import Word


def refuse_replaced(
    words: Sequence[Word], options: Mapping[str, Mapping[str, File]], given: Collection[Path], origin: Origin
) -> None:
    """Check that every list of items in a typed option is the list that runs.

    Files are merged key by key, but a list is replaced whole: the checks of an experiment would take the place of
    those of a typed `verify=eval`. A list that the command line sets itself is not checked.

    Raises:
        ConfigError: a typed option with a list that a later file replaces; names both files.
    """
    typed = {options[str(word.group)][option]: word for word in words for option in word.options}
    lists: dict[Path, tuple[File, Word]] = {}
    for layer, node in origin.layers:
        is_typed = layer.file in typed
        for path, line in _lists(node, layer.package):
            if any(path[: len(key)] == key for key in given):
                continue
            if path in lists and (is_typed or layer.file.parent != lists[path][0].parent):
                file, word = lists[path]
                group, key = word.group, ".".join(map(str, path))
                raise ConfigError(
                    f"command line: {word.typed}: {show_file(layer.file)}:{line} replaces {key} of {show_file(file)}; "
                    f"move that list into an option file of {group}, chosen by "
                    f"`override /{group}: NAME`"
                )
            if is_typed:
                lists[path] = (layer.file, typed[layer.file])


def _lists(node: Any, path: Path) -> Iterator[tuple[Path, int]]:
    """Return the path and line of each list in a file that is empty or has mappings as its items."""
    import yaml

    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        here, line = (*path, str(key.value)), key.start_mark.line + 1
        if isinstance(value, yaml.SequenceNode) and here != ("defaults",):
            if all(isinstance(item, yaml.MappingNode) for item in value.value):
                yield here, line
        else:
            yield from _lists(value, here)
