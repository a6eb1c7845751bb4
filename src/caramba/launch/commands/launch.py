"""`caramba launch [overrides]`: help, Hydra's own views, a composed configuration, a sweep, or one run."""

from __future__ import annotations

import sys

from caramba.launch.overrides import parse_argv
from caramba.runs.exit_codes import run_command


def run(argv: list[str] | None = None) -> int:
    """Run the command line of this process and return its exit status: 0, 1 for a failure, 2 for bad input, 130."""
    words = sys.argv[1:] if argv is None else argv
    return run_command(lambda: main(words), is_debug="--debug" in words)


def main(argv: list[str]) -> int:
    """Run `caramba launch ARGV` and return its exit status. What it needs is imported here, so that help is instant."""
    args = parse_argv(argv)
    if args.wants_version:
        from caramba import __version__

        print(f"caramba {__version__}")
        return 0
    if args.wants_help:
        from caramba.launch.commands.help import help_text

        print(help_text(args.config_dirs))
        return 0
    if args.native:
        from caramba.launch.hydra_cli import run_native

        return run_native(args)
    if args.cfg is not None:
        from caramba.launch.hydra_cli import show_config

        return show_config(args)
    if args.is_multirun:
        if any(word.lstrip("+").startswith("hydra/sweeper=") for word in args.overrides):
            from caramba.launch.sweeps.search import run_search

            return run_search(args)
        from caramba.launch.sweeps.grid import run_sweep

        return run_sweep(args)
    from caramba.launch.run import launch

    return launch(args)
