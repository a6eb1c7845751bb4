"""The process that planning measures in, `python -m caramba.experiment.probe`: candidates in, trials out, a line each.

Models have the run's shapes and fresh weights; data is random tokens. Nothing of the run is read or written.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from caramba.config.estimate import variant
from caramba.config.manifest import RunConfig, parse_manifest
from caramba.config.model import ModelSpec
from caramba.config.train import PhaseConfig
from caramba.console import logger
from caramba.distill import Objective
from caramba.errors import CarambaError
from caramba.experiment.objectives import build_objective
from caramba.experiment.planning import StepCandidate, Trial, run_trial
from caramba.experiment.session import Session, StageLedger
from caramba.layer import attention_backends
from caramba.model import build_model, build_with_random_weights
from caramba.runtime import MemoryMeter, RuntimePlan, apply_determinism, choose_device, is_out_of_memory

MODULE = "caramba.experiment.probe"


def request_of(session: Session, run: RunConfig) -> dict[str, Any]:
    """Return what the process needs to know: the manifest, the run, the teacher's shapes, the threads."""
    return {
        "manifest": session.manifest.model_dump(mode="json"),
        "group": session.group.name,
        "run": run.id,
        "teacher": session.shapes_of("teacher"),
        "student": session.shapes_of("student"),
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    """Answer candidates until there are no more. Only answers go to the standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logger.quiet = True
    request = json.loads(sys.stdin.readline())
    torch.set_num_threads(request["threads"])
    apply_determinism(bool(request["manifest"].get("deterministic")))
    meters: dict[str, MemoryMeter] = {}
    for line in sys.stdin:
        _answer(answers, request, StepCandidate(**json.loads(line)), meters)


def _answer(answers: TextIO, request: dict[str, Any], candidate: StepCandidate, meters: dict[str, MemoryMeter]) -> None:
    try:
        plain = {key: value for key, value in asdict(_trial(request, candidate, meters)).items() if key != "candidate"}
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        plain = {"seconds": (), "refusal": "out of memory before its first step", "is_out_of_memory": True}
    except CarambaError as error:
        plain = {"error": str(error)}
    answers.write(json.dumps(plain) + "\n")
    answers.flush()


def _trial(request: dict[str, Any], candidate: StepCandidate, meters: dict[str, MemoryMeter]) -> Trial:
    manifest = parse_manifest(request["manifest"])
    group = next(item for item in manifest.groups if item.name == request["group"])
    run = next(item for item in group.runs if item.id == request["run"])
    assert run.train is not None
    specs = {
        role: None if request[role] is None else ModelSpec.model_validate_json(json.dumps(request[role]))
        for role in ("teacher", "student")
    }
    is_control = run.train.control
    trains = "teacher" if is_control else run.train.trains
    if run.exp is not None:
        specs["student"] = variant(manifest.model, run.exp)
    elif trains == "student" or is_control:
        specs["student"] = specs["student"] or manifest.model
    device = choose_device(run.train.device or manifest.device)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(manifest, group, Path(folder), device, None, StageLedger(Path(folder)))

        def objective_of(phase: PhaseConfig, decided: RuntimePlan) -> Objective:
            session.teacher = session.student = None
            session.teacher, session.student = (
                None if spec is None else build_with_random_weights(spec, device)
                for spec in (specs["teacher"], specs["student"])
            )
            model = session.model_of("teacher" if trains == "teacher" else "student")
            model = copy.deepcopy(model) if is_control else model
            return build_objective(session, phase, decided, model.train())

        session.teacher, session.student = (
            None if spec is None else build_model(spec, device="meta") for spec in (specs["teacher"], specs["student"])
        )  # shapes are all that the choice of attention asks for
        with attention_backends(device, session.attention):
            return run_trial(
                candidate,
                run.train,
                lambda phase: session.plan(phase, run.id),
                objective_of,
                manifest=manifest,
                meter=meters.setdefault(device.type, MemoryMeter(device)),
                vocab_size=manifest.model.embedder.vocab_size,
                has_documents=group.data.keeps_documents_apart,
            )


if __name__ == "__main__":
    main()
