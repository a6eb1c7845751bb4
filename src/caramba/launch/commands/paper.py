"""`caramba paper RUN`: a paper from the artifacts of a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from caramba.config.paper import PaperConfig
from caramba.config.parse import parse_as
from caramba.config.resolve import load_tree, read_text
from caramba.console import logger
from caramba.errors import ConfigError, need_name, one_line
from caramba.launch.commands.arguments import CommandArguments
from caramba.paper import PaperDrafter
from caramba.runs import read_manifest, resolve_run

# Flag, the key that it sets, how its text is read.
_KEYS: tuple[tuple[str, tuple[str, ...], type], ...] = (
    ("--title", ("title",), str),
    ("--model", ("model",), str),
    ("--base-url", ("api", "base_url"), str),
    ("--api-key-env", ("api", "key_env"), str),
    ("--bib", ("citations", "bibliography"), str),
    ("--max-iterations", ("budget", "max_iterations"), int),
    ("--max-tokens", ("budget", "max_tokens"), int),
    ("--max-cost", ("budget", "max_cost_usd"), float),
)


def main(argv: list[str]) -> int:
    """Draft a paper, or continue one, and print its path.

    Raises:
        ConfigError: an option, the run, or what `PaperDrafter.draft_sync` needs and is not here.
    """
    parser = CommandArguments("paper")
    parser.add_argument("run", nargs="?")
    parser.add_argument("--output-dir")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--group")
    parser.add_argument("--config")
    parser.add_argument("--author", action="append")
    for flag, _, kind in _KEYS:
        parser.add_argument(flag, type=kind)
    args = parser.parse_args(argv)
    if args.run is None:
        parser.error("expected a run (a directory, runs/NAME, or latest)")
    logger.quiet = args.quiet
    run = resolve_run(args.run)
    manifest = read_manifest(run)
    known = [group.name for group in manifest.groups_to_run()]
    group = args.group
    if group is not None:
        need_name(group, known, "group of this run", f"--group NAME, of {', '.join(known)}", ConfigError)
    elif len(known) > 1:
        raise ConfigError(f"{run}: a paper is on one of its groups; --group NAME, of {', '.join(known)}")
    plain = _section(args.config) if args.config else _plain(manifest.paper or PaperConfig())
    for flag, path, _ in _KEYS:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if value is not None:
            _set(plain, path, value)
    if args.author:
        plain["authors"] = args.author
    config = parse_as(PaperConfig, plain)
    drafted = PaperDrafter(config, args.output_dir).draft_sync(
        run, update=args.update, group=group if len(known) > 1 else None
    )
    spent = drafted.spent
    cost = f", {spent.cost_usd:.4f} USD" if spent.cost_usd else ""
    logger.info(f"version {drafted.version}: {spent.iterations} requests, {spent.tokens:,} tokens{cost}")
    print(f"paper: {drafted.paper}\npdf: {drafted.pdf}")
    return 0


def _plain(config: PaperConfig) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _section(path: str) -> dict[str, Any]:
    """Read a `paper:` section, or its keys alone, from a YAML file."""
    try:
        loaded = load_tree(read_text(Path(path).expanduser(), f"--config {path}"), f"--config {path}")
    except ConfigError:
        raise
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: cannot be read as YAML: {one_line(error)}") from None
    if isinstance(loaded, dict) and isinstance(loaded.get("paper"), dict):
        loaded = loaded["paper"]
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: expected the keys of a paper section, got {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}


def _set(plain: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(plain.setdefault(key, {}), dict):
            return  # the schema reports the error
        plain = plain[key]
    plain[path[-1]] = value
