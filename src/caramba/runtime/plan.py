"""The RuntimePlan: the choices that a run's machine makes for it, written down with their reasons."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from caramba.config.train import PhaseConfig
from caramba.errors import ConfigError
from caramba.runs.files import write_json
from caramba.runtime.device import choose_device, device_facts


@dataclass(frozen=True)
class Decision:
    """One choice: its value, why, and the measurement behind it (empty when the manifest or a rule fixed it)."""

    value: Any
    reason: str
    measured: dict[str, float] | None = None


@dataclass(frozen=True)
class RuntimePlan:
    """Choices for one phase, keyed by a signature of the machine and the phase's config."""

    phase: str
    signature: str
    facts: dict[str, Any]
    decisions: dict[str, Decision]

    def value(self, name: str) -> Any:
        """Return the chosen value of `device`, `dtype`, `threads`, `compile_model`, `batch_size` or `kernels`."""
        return self.decisions[name].value


def plan(phase: PhaseConfig, *, device: str, kernels: str, name: str) -> RuntimePlan:
    """Decide how a phase runs here. Nothing is measured yet: every decision says what fixed it."""
    chosen = choose_device(phase.device or device)
    facts = device_facts(chosen)
    asked = phase.device or device
    decisions = {
        "device": Decision(
            chosen.type,
            "the manifest" if asked != "auto" else "auto: the first of cuda, mps, cpu that is here",
        ),
        "dtype": Decision(
            "float32",
            "the manifest"
            if phase.dtype != "auto"
            else "auto: fp32 until precision is planned by measurement",
        ),
        "threads": Decision(facts["threads"], "torch's default; frozen in the run, since sums depend on it"),
        "batch_size": Decision(phase.batch_size, "the manifest"),
        "compile_model": Decision(phase.compile_model, "the manifest"),
        "activation_checkpointing": Decision(phase.activation_checkpointing, "the manifest"),
        "attention": Decision("scaled_dot_product_attention", "torch picks the backend by shape and device"),
        "kernels": Decision("reference", f"kernels={kernels}: no op has a device kernel yet"),
    }
    key = json.dumps([facts, phase.model_dump(mode="json")], sort_keys=True, default=str)
    return RuntimePlan(name, hashlib.sha256(key.encode()).hexdigest(), facts, decisions)


def apply_threads(run_plan: Path) -> None:
    """Set torch's thread count to the one a resumed run started with, so that its sums stay bit-equal on a CPU."""
    if run_plan.is_file():
        threads = {phase.value("threads") for phase in load_plan(run_plan).values()}
        if len(threads) == 1:
            torch.set_num_threads(threads.pop())


def load_plan(path: Path) -> dict[str, RuntimePlan]:
    """Read plan.json: phase name -> plan.

    Raises:
        ConfigError: the file is not a plan.
    """
    try:
        raw = json.loads(path.read_text())
        return {
            name: RuntimePlan(
                name,
                item["signature"],
                item["facts"],
                {key: Decision(**value) for key, value in item["decisions"].items()},
            )
            for name, item in raw.items()
        }
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a runtime plan ({error}); delete it to plan again") from error


def save_plan(path: Path, made: RuntimePlan) -> None:
    """Add or replace one phase's plan in plan.json."""
    plans = load_plan(path) if path.is_file() else {}
    plans[made.phase] = made
    write_json(
        path,
        {
            name: {key: value for key, value in asdict(item).items() if key != "phase"}
            for name, item in plans.items()
        },
    )
