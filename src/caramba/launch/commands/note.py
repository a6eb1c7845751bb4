"""`caramba note RUN [TEXT]`: write a note to a run, which the studio shows, or print it."""

from __future__ import annotations

import dataclasses

from caramba.launch.commands.arguments import CommandArguments
from caramba.runs import resolve_run
from caramba.runs.annotations import read_for_change, write_annotations


def main(argv: list[str]) -> int:
    """Replace the note of a run; an empty text removes it, and without a text it is printed.

    Raises:
        ConfigError: a run that is not there, or whose annotations are damaged.
    """
    parser = CommandArguments("note")
    parser.add_argument("run")
    parser.add_argument("text", nargs="?")
    args = parser.parse_args(argv)
    run = resolve_run(args.run)
    found = read_for_change(run)
    if args.text is None:
        print(found.note or f"{run.parent.name}/{run.name} has no note")
        return 0
    write_annotations(run, dataclasses.replace(found, note=args.text))
    return 0
