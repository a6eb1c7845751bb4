"""What Hydra's own command line answers: --hydra-help, --info and shell completion."""

from __future__ import annotations

import os
import sys

import hydra

from caramba.launch.argv import Request
from caramba.launch.refuse import refuse_folder, refuse_words


@hydra.main(config_path="pkg://caramba.conf", config_name="config", version_base="1.3")
def _composed(config: object) -> None:
    raise AssertionError("Hydra was asked for information, and started the application")


def run_native(request: Request) -> int:
    """Hand a command line to Hydra, after the same refusals as everywhere else."""
    refuse_words(request.overrides)
    for folder in request.config_dirs:
        refuse_folder(folder)
    for command in ("launch", "compile"):
        # Completion sees the whole line; Hydra knows the program's name but not the command after it.
        line = os.environ.get("COMP_LINE", "")
        words = line.split(" ")
        if len(words) > 2 and words[1] == command:
            os.environ["COMP_LINE"] = " ".join([words[0], *words[2:]])
    folders = [item for folder in request.config_dirs for item in ("--config-dir", str(folder))]
    program = "caramba" if sys.argv[0].endswith((".py", "-c")) else sys.argv[0]
    sys.argv = [program, *request.native, *folders, *request.overrides]
    _composed()
    return 0
