"""`caramba schema`: the keys of a manifest, for people or as JSON Schema."""

from __future__ import annotations

import json

from caramba.config.plugins import use_plugins
from caramba.config.schema import json_schema, key_table
from caramba.launch.overrides import refuse_arguments


def main(argv: list[str]) -> int:
    """Run `caramba schema ARGV` and return its exit status."""
    plugins = [word for word in argv if word.startswith("plugins=")]
    refuse_arguments("schema", [word for word in argv if word != "--json" and word not in plugins])
    names = plugins[-1].partition("=")[2].strip("[]") if plugins else ""
    use_plugins({"plugins": [name.strip() for name in names.split(",") if name.strip()]})
    if "--json" in argv:
        print(json.dumps(json_schema(), indent=2))
        return 0
    section = None
    for name, key, default, note in key_table():
        if name != section:
            print(f"{'' if section is None else chr(10)}{name}")
            section = name
        print(f"  {key:<34} {default:<16} {note}".rstrip())
    return 0
