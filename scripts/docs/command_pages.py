"""Reference pages of every command, flag, config group and option."""

from __future__ import annotations

import textwrap

from markdown_cells import cell, code, heading, table

from caramba.launch.commands.help import FLAGS
from caramba.launch.commands.table import COMMANDS
from caramba.launch.config_files import description, groups

STATUSES = (
    ("0", "success"),
    ("1", "a failure"),
    ("2", "a mistake in the input"),
    ("75, 143", "a signal (SIGUSR1 or SIGUSR2; SIGTERM), after the state was saved"),
    ("79", "one of several ranks ran out of memory; `caramba resume` continues with a smaller batch"),
    ("130", "Ctrl-C"),
)


def commands() -> str:
    """Return the page of commands and flags."""
    lines = [
        "# Commands and flags",
        "",
        "`python -m caramba NAME` is the same as `caramba NAME`. [Commands](../commands.md) has examples.",
        "",
    ]
    for name, command in COMMANDS.items():
        sentence = command.summary
        call = textwrap.wrap(
            f"caramba {name} {command.usage}".strip(), 90, subsequent_indent="    ", break_on_hyphens=False
        )
        flags = command.flags or dict(FLAGS)
        rows = [[code(flag), cell(text)] for flag, text in flags.items()]
        lines += [*heading(name, name), f"{cell(sentence)[:1].upper()}{cell(sentence)[1:]}.", ""]
        lines += ["```text", *call, "```", "", *table(["flag", "meaning"], rows)]
    lines += [
        *heading("Exit status", "exit-status"),
        *table(["status", "meaning"], [[*row] for row in STATUSES]),
    ]
    return "\n".join(lines)


def options() -> str:
    """Return the page of config groups: each option with the first comment of its file."""
    lines = ["# Config groups", "", "`GROUP=OPTION` on a command line chooses one file of `conf/`.", ""]
    for group, files in sorted(groups().items()):
        rows = [[code(f"{group}={name}"), cell(description(file))] for name, file in sorted(files.items())]
        lines += [*heading(group, group), *table(["option", "content"], rows)]
    return "\n".join(lines)
