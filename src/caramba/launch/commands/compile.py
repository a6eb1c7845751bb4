"""`caramba compile`: the plan of an experiment, computed from its schema without torch."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from caramba.config.manifest import Manifest
from caramba.errors import ConfigError
from caramba.launch.freeze import freeze
from caramba.launch.overrides import CommandLine, parse_command, split_files
from caramba.launch.preflight import check_startable
from caramba.launch.run import check_launcher, run_to_resume
from caramba.runs.shell import join_words, show_path

if TYPE_CHECKING:
    from caramba.config.estimate import ExperimentPlan


def main(argv: list[str]) -> int:
    """Run `caramba compile ARGV` and return its exit status."""
    # The plan is what compile prints; with --json, --print-plan prints it too, to stderr.
    args = parse_command([word for word in argv if word not in ("--json", "--print-plan")], value_flags=("--group",))
    files, overrides = split_files(args)
    if len(files) > 1:
        raise ConfigError(f"compile: expected overrides or one manifest file, got {files}")
    args.overrides = [*(f"manifest={file}" for file in files), *overrides]
    return compile_plan(args, prints_json="--json" in argv, prints_plan="--print-plan" in argv)


def compile_plan(args: CommandLine, *, prints_json: bool, prints_plan: bool = True) -> int:
    """Compose, check what a launch checks before it loads torch, and print the plan.

    With `prints_json` stdout has JSON alone, and `prints_plan` puts the plan for people on stderr.

    Raises:
        CarambaError: what a launch would refuse too, unless only a device can tell.
    """
    from caramba.config.estimate import as_json, render, render_text
    from caramba.config.estimate.rendering import command_line

    _, experiment, notes = plan_of(args)
    if prints_json:
        if prints_plan:
            print(render_text(experiment), end="", file=sys.stderr)
        print(json.dumps({**as_json(experiment), "launch_notes": notes}, indent=2))
        return 0
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(render(experiment))
        print(command_line(experiment), end="")
    else:
        print(render_text(experiment), end="")
    for line in notes:
        print(f"note: {line}")
    return 0


def plan_of(args: CommandLine) -> tuple[Manifest, ExperimentPlan, list[str]]:
    """Return the manifest that a launch would freeze, its plan, and notes on the launch.

    Raises:
        CarambaError: what a launch would refuse too, unless only a device can tell.
    """
    from caramba.config.estimate import plan

    frozen = freeze(args.overrides, args.config_dirs)
    manifest, notes = check_startable(frozen, is_plan=True)
    check_launcher(manifest, is_plan=True)
    folders = [word for folder in args.config_dirs for word in ("--config-dir", str(folder))]
    command = join_words(["python", "-m", "caramba.launch", *folders, *frozen.overrides])
    experiment = plan(frozen.manifest, command=command, fit=frozen.fit, finished=_finished(manifest))
    return manifest, experiment, notes


def _finished(manifest: Manifest) -> dict[tuple[str, str], str]:
    """Return the stages on record in the run that a launch would resume, as (group, run id), and that run's path."""
    found = run_to_resume(manifest)
    if found is None:
        return {}
    run_dir = found[0]
    groups = manifest.groups_to_run()
    folders = {group.name: run_dir if len(groups) == 1 else run_dir / "groups" / group.name for group in groups}
    return {
        (name, file.stem.split("-", 1)[1]): show_path(run_dir)
        for name, folder in folders.items()
        for file in (folder / "stages").glob("*-*.json")
    }
