"""`caramba run FILE`: a single-file manifest."""

from __future__ import annotations

from caramba.errors import ConfigError
from caramba.launch.overrides import parse_command, split_files


def main(argv: list[str]) -> int:
    """Run `caramba run ARGV` and return its exit status."""
    args = parse_command(argv, value_flags=("--group",))
    files, overrides = split_files(args)
    if len(files) != 1:
        raise ConfigError(
            f"run: expected one manifest file, got {files or 'none'}; caramba run FILE [--group NAME] [KEY=VALUE]"
        )
    args.overrides = [f"manifest={files[0]}", *overrides]
    from caramba.launch.run import launch

    return launch(args)
