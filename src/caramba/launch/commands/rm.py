"""`caramba rm RUN...`: move runs to the archive, list it, bring runs back from it, or delete them for good."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from caramba.artifacts.style import byte_text
from caramba.console import align_columns
from caramba.errors import ConfigError
from caramba.launch.commands.arguments import CommandArguments
from caramba.runs import MANIFEST, resolve_run
from caramba.runs.archive import (
    Archived,
    archive_runs,
    find_dependents,
    list_archive,
    purge_runs,
    restore_runs,
    select_archived,
)

ALL = "all"


def main(argv: list[str]) -> int:
    """Move, list, restore or delete.

    Raises:
        ConfigError: a run that is not there or is running, or nothing to bring back.
    """
    parser = CommandArguments("rm")
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--undo", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--purge", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    args = parser.parse_args(argv)
    asked = [name for name in ("undo", "list", "purge") if getattr(args, name)]
    if len(asked) > 1:
        raise ConfigError(f"rm: --{asked[0]} and --{asked[1]}: give one of them")
    root = args.folder.expanduser().absolute()
    if args.list:
        return _list(list_archive(root))
    if args.undo:
        return _undo(root, args)
    if args.purge:
        return _purge(root, args)
    return _archive(args)


def _archive(args: argparse.Namespace) -> int:
    if not args.runs:
        raise ConfigError("rm: got no run; name runs, or use --list, --undo or --purge")
    runs = [_one_run(text) for text in args.runs]
    dependents = find_dependents(runs)
    moved = archive_runs(runs)
    for item in moved:
        print(f"archived {item.name}")
        for other in dependents.get(item.name, ())[:3]:
            print(f"  its command line has it: {other}, which cannot resume until it is back")
    if not args.quiet:
        print("bring back: caramba rm --undo; delete for good: caramba rm --purge RUN")
    return 0


def _one_run(text: str) -> Path:
    """Return the run that a text names itself: NAME alone, which elsewhere means its newest run, is refused."""
    run = resolve_run(text)
    if text != "latest" and Path(text).absolute().name != run.name and not text.endswith(MANIFEST):
        raise ConfigError(f"rm: {text}: names all runs of {run.parent.name}; give the run itself, as {run}")
    return run


def _list(items: list[Archived]) -> int:
    if not items:
        print("the archive is empty")
        return 0
    rows = [("run", "archived", "size")]
    for item in items:
        when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(item.time))
        rows.append((item.name, when, byte_text(float(item.count_bytes()))))
    print(align_columns(rows))
    return 0


def _undo(root: Path, args: argparse.Namespace) -> int:
    items = select_archived(root, args.runs) if args.runs else list_archive(root)
    if not items:
        raise ConfigError(f"rm: --undo: the archive of {root} is empty; --folder names another folder of runs")
    if not args.runs:
        items = [item for item in items if item.batch == items[-1].batch]
    restore_runs(items)
    for item in items:
        print(f"restored {item.name}")
    return 0


def _purge(root: Path, args: argparse.Namespace) -> int:
    if not args.runs:
        raise ConfigError("rm: --purge deletes for good; name runs of the archive, or all")
    items = list_archive(root) if args.runs == [ALL] else select_archived(root, args.runs)
    total = purge_runs(items)
    print(f"deleted {len(items)} {'run' if len(items) == 1 else 'runs'}, {byte_text(float(total))}")
    return 0
