"""`caramba compile`: the plan of an experiment, computed from its schema without torch."""

from __future__ import annotations

import json
import shlex
import sys

from caramba.errors import ConfigError
from caramba.launch.argv import Request
from caramba.launch.freeze import Frozen, freeze


def compile_plan(request: Request, *, prints_json: bool) -> int:
    """Compose, validate and print the plan; what a run would still refuse is noted."""
    from caramba.cost import as_json, plan, render, render_text

    frozen = freeze(request.overrides, request.config_dirs)
    notes = _notes(frozen)
    folders = [word for folder in request.config_dirs for word in ("--config-dir", str(folder))]
    command = shlex.join(["python", "-m", "caramba.launch", *folders, *frozen.overrides])
    experiment = plan(frozen.manifest, command=command, fit=frozen.fit)
    if prints_json:
        print(json.dumps({**as_json(experiment), "launch_notes": notes}, indent=2))
        return 0
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(render(experiment))
    else:
        print(render_text(experiment), end="")
    for line in notes:
        print(f"note: {line}")
    return 0


def _notes(frozen: Frozen) -> list[str]:
    """What a launch would still refuse. Data that nobody chose may not fit the model: a plan needs no data."""
    notes = frozen.unbuilt()
    try:
        frozen.check_vocabulary()
    except ConfigError as error:
        if frozen.is_data_chosen:
            raise
        notes.append(f"a launch needs data for this model: {error}")
    return notes
