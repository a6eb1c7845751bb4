"""The RuntimePlan: the choices that a run's machine makes for it, written down with their reasons."""

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from caramba.config.train import AUTO_LR, AUTO_LR_WIDTH, BLOCK_PHASES, PhaseConfig
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.runs.files import home, write_json
from caramba.runtime.device import choose_device, choose_precision, device_facts
from caramba.runtime.tuned import AttentionChoice, choose_attention

DAMAGE = (ValueError, KeyError, TypeError, AttributeError)
"""What reading a file that is no plan raises; ValueError: neither JSON nor text."""


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
        """Return the chosen value of a decision: `device`, `dtype`, `precision`, `lr`, `threads`, `compile_model`, …"""
        return self.decisions[name].value


def plan(
    phase: PhaseConfig,
    *,
    device: str,
    kernels: str,
    ops: Mapping[str, str],
    name: str,
    d_model: int = AUTO_LR_WIDTH,
    attention: AttentionChoice | None = None,
    measured: RuntimePlan | None = None,
    ranks: int = 1,
) -> RuntimePlan:
    """Decide how a phase of a model of width `d_model` runs here: by what was `measured`, else by the manifest and by
    rules. Every decision records its source.

    `ranks` share the data of a step. `ops` is the backend of every op on that device, as `caramba.kernels.load`
    returned it under the policy `kernels`.
    """
    chosen = choose_device(phase.device or device)
    facts = device_facts(chosen)
    asked = phase.device or device
    decisions = {
        "device": Decision(
            chosen.type,
            "the manifest" if asked != "auto" else "auto: the first of cuda, mps, cpu that is here",
        ),
        "lr": Decision(
            phase.learning_rate_at(d_model, ranks),
            (
                "the manifest"
                if phase.lr != "auto"
                else f"auto: {AUTO_LR[phase.phase][0]:g} times ({AUTO_LR_WIDTH}/{d_model})^{AUTO_LR[phase.phase][1]:g}"
            )
            + (f", times {phase.lr_factor(ranks):g} for the batch" if phase.lr_scaling != "none" else ""),
        ),
        **_precision(phase, chosen),
        "threads": Decision(facts["threads"], "torch's default; frozen in the run, since sums depend on it"),
        "batch_size": Decision(phase.batch_size, "the manifest"),
        "gradient_accumulation_steps": Decision(phase.gradient_accumulation_steps, "the manifest"),
        "data_parallel": Decision(ranks, "ranks that share the data of a step"),
        "num_workers": Decision(phase.num_workers, "the manifest"),
        "compile_model": Decision(phase.compile_model, "the manifest"),
        "activation_checkpointing": _checkpointing(phase),
        "attention": _attention(attention or choose_attention(chosen)),
        "kernels": Decision(dict(ops), f"kernels={kernels}: what was attached for {chosen.type}"),
    }
    key = json.dumps([facts, phase.model_dump(mode="json")], sort_keys=True, default=str)
    if measured is not None:
        return RuntimePlan(name, measured.signature, facts, decisions | measured.decisions)
    return RuntimePlan(name, hashlib.sha256(key.encode()).hexdigest(), facts, decisions)


def trainable_decision(phase: PhaseConfig, *, is_kept: bool) -> Decision:
    """What a phase of blocks trains: `is_kept` where W_q and W_o stay as surgery copied them."""
    auto = f"auto: surgery copied {'' if is_kept else 'no '}W_q and W_o"
    return Decision("maps" if is_kept else "all", auto if phase.trainable == "auto" else "the manifest")


def _checkpointing(phase: PhaseConfig) -> Decision:
    if phase.phase in BLOCK_PHASES and phase.activation_checkpointing != "none":
        return Decision("none", f"phase={phase.phase} holds the graph of one block: nothing to checkpoint")
    return Decision(phase.activation_checkpointing, "the manifest")


def _attention(choice: AttentionChoice) -> Decision:
    order = "scaled_dot_product_attention" if choice.order is None else ", ".join(choice.order)
    return Decision(order, choice.source, choice.measured_ms or None)


def _precision(phase: PhaseConfig, device: torch.device) -> dict[str, Decision]:
    """Return `dtype`, what matrix products are computed in, `weights`, what they are kept in, and the `precision`."""
    chosen = choose_precision(phase, device)
    return {
        "dtype": Decision(chosen.dtype, chosen.reason),
        "weights": Decision(chosen.weights, chosen.keeps),
        "precision": Decision(chosen.mode, chosen.keeps),
        "tf32": Decision(phase.tf32, "the manifest"),
        "activation_offload": Decision(phase.activation_offload, "the manifest"),
        "float8": Decision(phase.float8, "the manifest"),
    }


def apply_threads(run_plan: Path) -> None:
    """Set torch's thread count to that of the run before it was resumed, for bit-equal sums on a CPU."""
    threads = {phase.value("threads") for phase in read_valid_plans(run_plan).values()}
    if len(threads) == 1:
        torch.set_num_threads(threads.pop())


def read_valid_plans(run_plan: Path) -> dict[str, RuntimePlan]:
    """Read a run's plan.json, {} without one. A damaged file is renamed with a warning, and planned again."""
    if not run_plan.is_file():
        return {}
    try:
        plans = _read_plans(run_plan)
        for name, made in plans.items():
            _check_threads(name, made)
        return plans
    except DAMAGE as error:
        aside = _free_name(run_plan)
        run_plan.replace(aside)
        logger.warning(
            f"{run_plan}: not a runtime plan ({error}); it is {aside.name} now, and every phase is planned again: one "
            "that had begun resumes with the batch that is planned now, and without the thread count that was frozen "
            "in the plan, so that its sums on a CPU may differ"
        )
        return {}


def _check_threads(name: str, made: RuntimePlan) -> None:
    if "threads" not in made.decisions:
        raise ValueError(f"phase {name} has no threads")
    threads = made.value("threads")
    if type(threads) is not int or threads < 1:
        raise ValueError(f"phase {name} has threads={threads!r}, which is no count")


def _free_name(run_plan: Path) -> Path:
    """Return plan.damaged.json, or the first of plan.damaged.2.json, … that is free: an earlier one is kept."""
    endings = itertools.chain(("",), (f".{number}" for number in itertools.count(2)))
    names = (run_plan.with_name(f"{run_plan.stem}.damaged{ending}.json") for ending in endings)
    return next(name for name in names if not name.exists())


def load_plan(path: Path) -> dict[str, RuntimePlan]:
    """Read plan.json: phase name -> plan.

    Raises:
        ConfigError: the file is not a plan.
    """
    try:
        return _read_plans(path)
    except DAMAGE as error:
        raise ConfigError(f"{path}: not a runtime plan ({error}); delete it to plan again") from error


def _read_plans(path: Path) -> dict[str, RuntimePlan]:
    return {
        name: RuntimePlan(
            name,
            item["signature"],
            item["facts"],
            {key: Decision(**value) for key, value in item["decisions"].items()},
        )
        for name, item in json.loads(path.read_text()).items()
    }


def save_plan(path: Path, made: RuntimePlan) -> None:
    """Add or replace one phase's plan in plan.json."""
    plans = load_plan(path) if path.is_file() else {}
    write_plans(path, {**plans, made.phase: made})


def write_plans(path: Path, plans: Mapping[str, RuntimePlan]) -> None:
    """Write plan.json, which `load_plan` reads."""
    write_json(
        path,
        {name: {key: value for key, value in asdict(item).items() if key != "phase"} for name, item in plans.items()},
    )


FOLDER = "runtime_plans"
# Neither speed nor memory depends on these, so that a sweep over them measures once. Steps count only where the time of
# compilation counts.
IMMATERIAL = (
    "lr",
    "lr_mult",
    "seed",
    "betas",
    "weight_decay",
    "scheduler",
    "warmup_steps",
    "min_lr_ratio",
    "temperature",
    "save_every",
    "eval_every",
    "cache_teacher_outputs",
    "teacher_cache_max_gb",
    "teacher_logits",
    "lr_scaling",
    "lr_base_batch",
    "decay_ratio",
    "momentum",
    "kl_weight",
)


def signature_of(phase: PhaseConfig, facts: Mapping[str, Any], **context: Any) -> str:
    """Return the key of a plan: SHA-256 of the machine's facts, the phase's config and what else it runs on."""
    has_steps = phase.compile_model == "auto"
    plain = phase.model_dump(mode="json", exclude={*IMMATERIAL, *(() if has_steps else ("steps",))})
    text = json.dumps([dict(facts), plain, context], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def plan_path(signature: str) -> Path:
    """Return the file of a cached plan: `runtime_plans/SIGNATURE.json` of the caches' folder."""
    return home() / FOLDER / f"{signature[:16]}.json"


def cached_plan(signature: str) -> RuntimePlan | None:
    """Return what was measured under a signature. A file that is damaged or another's is left out with a warning."""
    path = plan_path(signature)
    if not path.is_file():
        return None
    try:
        (found,) = load_plan(path).values()
    except (ConfigError, ValueError, OSError) as error:
        logger.warning(f"{path}: not a plan ({error}); measuring again")
        return None
    if found.signature != signature:
        logger.warning(f"{path}: made for another machine or manifest; measuring again")
        return None
    return found


def store_plan(made: RuntimePlan) -> Path:
    """Keep a measured plan for the next run of its signature, in place of any before."""
    path = plan_path(made.signature)
    write_plans(path, {made.phase: made})
    return path
