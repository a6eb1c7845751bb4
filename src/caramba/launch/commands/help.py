"""`--help`: usage, commands, groups and their options, from the standard library alone so that it is instant."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

from caramba.launch.commands.table import COMMANDS
from caramba.launch.config_files import description, groups

USAGE = """\
caramba: compose an experiment, train it, verify it, measure it, and get the tables and figures.

usage: caramba launch [GROUP=OPTION | KEY=VALUE]... [flags]      (or: python -m caramba.launch …)
       caramba COMMAND …

Without arguments: model=tiny_dba train=upcycle data=stdlib benchmark=quick"""

FLAGS = (
    (
        "-m, --multirun",
        "run every combination of values (a=1,2, choice, range, glob), each its own run; the same command resumes",
    ),
    ("--config-dir DIR", "add a folder of your own groups"),
    ("--cfg job [--resolve] [--package KEY]", "print the composed configuration and stop"),
    ("--quiet", "print results and errors only"),
    ("--debug", "show tracebacks"),
    ("--info [WHAT], --hydra-help", "Hydra's own views: defaults, defaults-tree, searchpath, plugins"),
    (
        "--shell-completion install=bash",
        'completion: eval "$(caramba --shell-completion install=bash)" (also zsh, fish)',
    ),
)


def help_text(config_dirs: Iterable[Path] = ()) -> str:
    """Return the help, with every group on the search path."""
    lines = [USAGE, "", "commands:"]
    lines += [_row(f"{name} {command.usage}".strip(), command.summary, 44) for name, command in COMMANDS.items()]
    lines += ["", "flags:", *(_row(flag, text, 33) for flag, text in FLAGS), "", "groups and options:"]
    for group, options in sorted(groups(config_dirs).items()):
        lines.append(f"  {group}")
        lines += [f"    {_row(option, description(file), 20).lstrip()}" for option, file in sorted(options.items())]
    lines += [
        "",
        "keys: any key of the composition, e.g. train.steps=100 train.phases.blockwise.lr=1e-3 seed=1 group=NAME",
        "      resume=auto|never|RUN   manifest=FILE   (all keys: caramba schema)",
        "      plugins=[my_pkg.layers]   modules of your own with layers to use by `type` (docs/layers.md)",
    ]
    return "\n".join(lines)


def command_help(command: str) -> str:
    """Return the help of one command: usage, what it does, and a sentence for every flag."""
    entry = COMMANDS[command]
    usage = f"usage: caramba {command} {entry.usage}".rstrip()
    rows = [_row(flag, sentence, 33) for flag, sentence in entry.flags.items()]
    return "\n".join([_wrapped(usage, " " * 7), "", *textwrap.wrap(entry.summary, 102), "", "flags:", *rows])


def _wrapped(words: str, indent: str) -> str:
    """Break a line of options between them, under one another."""
    whole = re.sub(r"\[[^][]*\]", lambda option: option[0].replace(" ", "\0"), words)
    lines = textwrap.fill(whole, 102, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def _row(name: str, text: str, width: int) -> str:
    shown = _wrapped(f"  {name}", " " * 6)
    head = f"  {name:<{width}}" if len(name) < width else f"{shown}\n{'':{width + 2}}"
    return head + ("\n" + " " * (width + 2)).join(textwrap.wrap(text, 100 - width, break_on_hyphens=False) or [""])
