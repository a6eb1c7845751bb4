"""What a search draws from: its settings on the command line, and the distribution of every key that varies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hydra.core.override_parser.types import Glob, IntervalSweep, RangeSweep
from pydantic import Field

from caramba.config.base import Config
from caramba.config.layer import Positive
from caramba.config.manifest import Manifest
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from caramba.launch.axes import points, read_override
from caramba.launch.refuse import refuse_words

if TYPE_CHECKING:
    import optuna

CHOICE, PREFIX = "hydra/sweeper", "hydra.sweeper."


class SearchConfig(Config):
    """What `hydra.sweeper.KEY` sets. Without `metric` it is the student's perplexity, else the last phase's loss."""

    n_trials: Positive = 20
    metric: str | None = None
    direction: Literal["auto", "minimize", "maximize"] = "auto"
    sampler: Literal["tpe", "random"] = "tpe"
    seed: Annotated[int, Field(ge=0)] = 1337


@dataclass(frozen=True)
class Space:
    """The words that hold for every trial, and the distribution of each key that a trial draws, by `+key`."""

    fixed: list[str]
    drawn: dict[str, optuna.distributions.BaseDistribution]

    def words(self, params: dict[str, Any]) -> list[str]:
        return [f"{key}={value}" for key, value in params.items()]


def split_words(overrides: list[str]) -> tuple[list[str], SearchConfig]:
    """Return the words of the experiment, and the settings of the search among the others.

    Raises:
        ConfigError: another sweeper, or a setting that there is none of.
    """
    words: list[str] = []
    settings: dict[str, Any] = {}
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key == CHOICE:
            if value != "optuna":
                raise ConfigError(f"{word}: the sweepers are optuna, and without {CHOICE} every combination")
        elif key.startswith(PREFIX):
            name = key.removeprefix(PREFIX).replace("sampler.seed", "seed")
            settings[name] = read_override(f"{name}={value}")[1].value()
        else:
            words.append(word)
    refuse_words(words)
    try:
        return words, parse_as(SearchConfig, settings)
    except ConfigError as error:
        raise ConfigError(f"{PREFIX}{error}") from None


def read_space(words: list[str], config_dirs: list[Path]) -> Space:
    """Read `interval(…)`, `tag(log, interval(…))`, `range(…)` and choices as distributions.

    Raises:
        ConfigError: no word has more than one value, or a bound that its distribution cannot have.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    fixed: list[str] = []
    drawn: dict[str, optuna.distributions.BaseDistribution] = {}
    for word in words:
        sign, override = read_override(word)
        if sign == "~" or not override.is_sweep_override():
            fixed.append(word)
            continue
        key, value = sign + word[len(sign) :].partition("=")[0], override.value()
        try:
            if isinstance(value, IntervalSweep):
                assert value.start is not None
                assert value.end is not None
                is_log = "log" in value.tags
                is_int = isinstance(value.start, int) and isinstance(value.end, int)
                kind = IntDistribution if is_int else FloatDistribution
                drawn[key] = kind(value.start, value.end, log=is_log)  # type: ignore[arg-type]
            elif (
                isinstance(value, RangeSweep) and isinstance(value.start, int) and isinstance(value.step, int)
            ):
                assert value.stop is not None
                last = range(value.start, int(value.stop), value.step)[-1]
                drawn[key] = IntDistribution(value.start, last, step=value.step)
            elif isinstance(value, Glob):
                options = [item[0].partition("=")[2] for item in points([word], config_dirs)]
                drawn[key] = CategoricalDistribution(options)
            else:
                drawn[key] = CategoricalDistribution(list(override.sweep_string_iterator()))
        except (ValueError, IndexError) as error:
            raise ConfigError(f"command line: {word}: {error}") from None
    if not drawn:
        raise ConfigError(
            f"{CHOICE}=optuna: no key has values to draw from; write KEY=interval(a,b), 'KEY=tag(log,interval(a,b))', "
            "KEY=range(a,b) or KEY=choice(a,b)"
        )
    return Space(fixed, drawn)


def default_metric(manifest: Manifest) -> str:
    """Return what a search is about when nobody says: the student's perplexity, else the loss of the last phase.

    Raises:
        ConfigError: the runs measure neither.
    """
    group = manifest.groups_to_run()[-1]
    prefix = f"{group.name}/" if len(manifest.groups_to_run()) > 1 else ""
    if any(bench.config.type == "perplexity" for bench in group.benchmarks):
        return f"{prefix}perplexity.student.perplexity"
    phases = [run.id for run in group.runs if run.train is not None]
    if not phases:
        raise ConfigError(f"{PREFIX}metric: the runs measure no perplexity and train nothing; name a metric")
    return f"{prefix}loss.{phases[-1]}"


def first_value(distribution: optuna.distributions.BaseDistribution) -> Any:
    choices = getattr(distribution, "choices", None)
    return choices[0] if choices is not None else getattr(distribution, "low")  # noqa: B009 - of two classes
