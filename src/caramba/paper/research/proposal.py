"""A proposed experiment: the hash of a base manifest and typed patches of a few keys, each within its range."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from caramba.config.base import Config
from caramba.config.manifest import Manifest
from caramba.config.parse import parse_as
from caramba.config.resolve import load_tree, read_text
from caramba.config.source import is_sequence
from caramba.errors import ConfigError, one_line
from caramba.runs.manifest import manifest_sha256

# Keys of a training phase that a proposal may set. Numbers: the lowest and highest value; words: all of them.
RANGES: dict[str, tuple[float, float]] = {
    "lr": (1e-6, 1e-1),
    "weight_decay": (0.0, 1.0),
    "warmup_steps": (0, 10_000),
    "max_grad_norm": (0.01, 100.0),
    "min_lr_ratio": (0.0, 1.0),
    "kl_weight": (0.0, 1.0),
}
CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "muon"),
    "scheduler": ("constant", "linear", "cosine", "wsd"),
}
Key = Literal[
    "lr",
    "weight_decay",
    "warmup_steps",
    "max_grad_norm",
    "min_lr_ratio",
    "kl_weight",
    "optimizer",
    "scheduler",
]
_TAKEN = ("baseline", "held_out")  # folders of runs that belong to no proposal
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


class Patch(Config):
    """One key of every training phase and its new value."""

    key: Key
    value: float | int | str

    @model_validator(mode="after")
    def _in_range(self) -> Patch:
        if self.key in RANGES:
            low, high = RANGES[self.key]
            if isinstance(self.value, str) or not low <= self.value <= high:
                raise ValueError(f"{self.key}={self.value!r}: expected a number from {low:g} to {high:g}")
        elif self.value not in CHOICES[self.key]:
            raise ValueError(f"{self.key}={self.value!r}: expected one of {', '.join(CHOICES[self.key])}")
        return self


def _tuples(given: Any) -> Any:
    """Return a list of lists, as YAML and JSON have it, as the schema does."""
    return tuple(tuple(item) if isinstance(item, list) else item for item in given) if is_sequence(given) else given


Patches = Annotated[tuple[Patch, ...], Field(min_length=1, max_length=8)]
Trials = Annotated[tuple[Patches, ...], BeforeValidator(_tuples), Field(max_length=8)]
TRIALS = "settings that both arms are tuned over before the test, next to their own; each arm takes its best"


class Proposal(Config):
    """What is to be tried, and why, stated before it runs."""

    name: str = Field(description="letters, digits and _; names the experiment's folder")
    base_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="hash of the base run's manifest.json"
    )
    rationale: Annotated[str, Field(min_length=1, max_length=2000)]
    hypothesis: Annotated[str, Field(min_length=1, max_length=2000)]
    smallest_effect: Annotated[float, Field(ge=0)] = Field(description="smallest difference of the metric that matters")
    patches: Patches
    trials: Trials = Field(default=(), description=TRIALS)

    @field_validator("name")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if value in _TAKEN:
            raise ValueError(f"the loop has a folder of that name; expected none of {', '.join(_TAKEN)}")
        if not _NAME.fullmatch(value):
            raise ValueError("expected a small letter, then small letters, digits and _, 40 in all")
        return value

    @model_validator(mode="after")
    def _distinct(self) -> Proposal:
        # Of a key that the patches set, the arms could not try the same values.
        for patches in (self.patches, *((*self.patches, *trial) for trial in self.trials)):
            keys = [patch.key for patch in patches]
            if len(set(keys)) != len(keys):
                raise ValueError("two patches set one key, or a trial one of the patches; set each once")
        return self


def read_proposal(file: Path) -> Proposal:
    """Read a proposal from YAML.

    Raises:
        ConfigError: no such file, or not a proposal.
    """
    try:
        plain = load_tree(read_text(file, str(file)), str(file))
    except ConfigError:
        raise
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read as YAML: {one_line(error)}") from None
    if not isinstance(plain, dict):
        raise ConfigError(f"{file}: expected the keys of a proposal, got {type(plain).__name__}")
    return parse_as(Proposal, cast("dict[str, Any]", plain))


def arm_manifest(base: Manifest, seed: int, proposal: Proposal | None = None, trial: Sequence[Patch] = ()) -> Manifest:
    """Return the manifest of one arm and seed: the base's with the seed in every phase, and the patches if given.

    `trial` are the settings that the arm is tuned to.

    Raises:
        ConfigError: the proposal is on another base, or the result is no valid manifest.
    """
    if proposal is not None and proposal.base_sha256 != manifest_sha256(base):
        raise ConfigError(
            f"proposal {proposal.name}: base_sha256 is {proposal.base_sha256[:12]}…, the base run's manifest has "
            f"{manifest_sha256(base)[:12]}…; propose on this run"
        )
    patches = (*(proposal.patches if proposal is not None else ()), *trial)
    plain: dict[str, Any] = json.loads(json.dumps(base.model_dump(mode="json")))
    plain |= {"paper": None, "review": None, "research": None}
    if "seed" in plain:
        plain["seed"] = seed
    for group in plain["groups"]:
        for run in group["runs"]:
            run["seed"] = seed
            if run["train"] is not None:
                run["train"]["seed"] = seed
                run["train"] |= {patch.key: patch.value for patch in patches}
    if patches:
        plain["origin"] = "agent"
    return parse_as(Manifest, plain)
