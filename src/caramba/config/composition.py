"""Schema of what the config groups compose to, one section per group; `lower` turns it into a Manifest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Optional, get_type_hints

from pydantic import BeforeValidator, Field, create_model

from caramba.config.base import Config
from caramba.config.benchmark import BenchmarkConfig
from caramba.config.data import DataConfig
from caramba.config.manifest import LoggerConfig, Manifest, SettingsConfig, Slug
from caramba.config.parallel import LauncherConfig
from caramba.config.train import PhaseConfig
from caramba.config.trainer import ELSEWHERE, EarlyStoppingConfig, TrainerConfig
from caramba.config.verify import VerifyConfig
from caramba.errors import SYNONYMS, nearest


class PartialPhaseBase(Config):
    """Any keys of a phase: what a `train` option sets for all phases, or for one."""

    aliases = PhaseConfig.aliases


_PHASE_TYPES = get_type_hints(PhaseConfig, include_extras=True)
_OPTIONAL: dict[str, Any] = {
    name: (_PHASE_TYPES[name] | None, Field(default=None, description=field.description))
    for name, field in PhaseConfig.model_fields.items()
}
PartialPhase = create_model("PartialPhase", __base__=PartialPhaseBase, **_OPTIONAL)
_GROUP: dict[str, Any] = {"phases": (dict[Slug, PartialPhase], Field(default_factory=dict[str, Any]))}
TrainGroup = create_model("TrainGroup", __base__=PartialPhase, **_GROUP)
TrainGroup.__doc__ = "The `train` group: phases in order, and keys that hold for all of them."


class SuiteConfig(Config):
    """The `benchmark` group: what is measured after training."""

    benchmarks: tuple[BenchmarkConfig, ...] = ()


class ChecksConfig(Config):
    """The `verify` group: how the student is compared with its teacher after the last phase."""

    checks: tuple[VerifyConfig, ...] = ()


class CompositionBase(Config):
    """What `Composition` takes of its class; its keys are those of a manifest, with groups of options for `groups`."""

    aliases = Manifest.aliases

    @classmethod
    def hint(cls, key: str, names: Sequence[str]) -> str:
        place = place_of(key)
        if place is None and key in ELSEWHERE:
            return f"; here it is {ELSEWHERE[key]};"
        return f"; did you mean {place!r}?" if place is not None else nearest(key, names)


_TYPES = get_type_hints(Manifest, include_extras=True)
_SECTIONS: dict[str, Any] = {
    "train": (Annotated[Any, BeforeValidator(TrainGroup.model_validate)], ...),
    "data": (DataConfig, ...),
    "benchmark": (SuiteConfig, SuiteConfig()),
    "verify": (ChecksConfig, ChecksConfig()),
}
_SHARED = {name: (_TYPES[name], field.default) for name, field in Manifest.model_fields.items()}
_SHARED["name"] = (Optional[Slug], None)  # noqa: UP045 - an alias of an annotated type has no |
_KEYS: dict[str, Any] = {}
for _name, _key in _SHARED.items():
    _KEYS.update(_SECTIONS if _name == "groups" else {_name: _key})
Composition = create_model("Composition", __base__=CompositionBase, **_KEYS)
Composition.__doc__ = "The composed groups. `name` defaults to `<model option>_<train option>`."


def place_of(key: str) -> str | None:
    """Return where a key is that was given without its section, such as `train.lr` for `lr` or `learning_rate`."""
    places = {
        **{name: f"settings.{name}" for name in SettingsConfig.model_fields},
        **{name: f"logger.{name}" for name in LoggerConfig.model_fields},
        **{name: f"launcher.{name}" for name in LauncherConfig.model_fields if name != "devices"},
        **{name: f"trainer.early_stopping.{name}" for name in EarlyStoppingConfig.model_fields},
        **{name: f"trainer.{name}" for name in TrainerConfig.model_fields},
        **{name: f"data.{name}" for name in DataConfig.model_fields},
        **{name: f"model.embedder.{name}" for name in ("d_model", "vocab_size")},
        **{"checkpoint": "model.checkpoint", "repeat": "model.topology.layers.0.repeat"},
        **{name: f"train.{name}" for name in (*PhaseConfig.model_fields, *PhaseConfig.aliases)},
    }
    name = key.lower().replace("-", "_")
    for found in (name, SYNONYMS.get(name, "")):
        if found in places and found not in Composition.model_fields:
            return places[found]
    return None
