"""`caramba tag RUN NAME... [--remove]`: give a run tags, which the studio shows and filters by."""

from __future__ import annotations

import dataclasses

from caramba.errors import ConfigError
from caramba.launch.commands.arguments import CommandArguments
from caramba.runs import resolve_run
from caramba.runs.annotations import read_for_change, write_annotations

MOST_CHARACTERS = 80


def main(argv: list[str]) -> int:
    """Add tags to a run, or remove them, and print those that it has.

    Raises:
        ConfigError: a run that is not there, a tag that is not one short word, or one to remove that it has not.
    """
    parser = CommandArguments("tag")
    parser.add_argument("run")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--remove", action="store_true")
    args = parser.parse_args(argv)
    run = resolve_run(args.run)
    for name in args.names:
        if not name.isprintable() or name.split() != [name] or "," in name or len(name) > MOST_CHARACTERS:
            raise ConfigError(
                f"tag: {name[:MOST_CHARACTERS]!r}: expected one word of at most {MOST_CHARACTERS} characters, without "
                "commas"
            )
    found = read_for_change(run)
    if args.remove:
        missing = [name for name in args.names if name not in found.tags]
        if missing:
            raise ConfigError(
                f"tag: --remove {missing[0]}: {run.name} has no such tag; tags: {', '.join(found.tags) or 'none'}"
            )
        tags = [tag for tag in found.tags if tag not in args.names]
    else:
        tags = list(dict.fromkeys([*found.tags, *args.names]))
    if tags != found.tags:
        write_annotations(run, dataclasses.replace(found, tags=tags))
    print(f"{run.parent.name}/{run.name}: {', '.join(tags) or 'no tags'}")
    return 0
