"""The points of a sweep: `a=1,2`, `choice(…)`, `range(…)` and `glob(…)` expanded to every combination."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from caramba.errors import ConfigError
from caramba.launch.groups import groups
from caramba.launch.refuse import refuse_words


def points(overrides: list[str], config_dirs: Sequence[Path] = ()) -> list[list[str]]:
    """Expand `a=1,2`, `choice(…)`, `range(…)` and `glob(…)` into one list of overrides per combination.

    Raises:
        ConfigError: a text that Hydra cannot read, an interval, which has no finite set of values, or a glob that
            matches nothing.
    """
    refuse_words(overrides)
    axes: list[list[str]] = []
    for word in overrides:
        sign, override = read_override(word)
        if sign == "~" or not override.is_sweep_override():
            axes.append([word])
            continue
        if override.is_interval_sweep():
            raise ConfigError(
                f"command line: {word}: an interval has no finite set of values; use choice(…) or range(…), or "
                "let hydra/sweeper=optuna draw from it"
            )
        key = word[len(sign) :].partition("=")[0]
        values = _values(override, key, config_dirs)
        if not values:
            raise ConfigError(f"command line: {word}: matches no option of {key}")
        axes.append([f"{sign}{key}={value}" for value in values])
    return [list(point) for point in itertools.product(*axes)]


def read_override(word: str) -> tuple[str, Override]:
    """Return the sign of an override (`+`, `++`, `~` or none), and what Hydra reads in the rest."""
    sign = "" if word[:1].isalnum() else word[: len(word) - len(word.lstrip("+~"))]
    body = word[len(sign) :]
    try:
        return sign, OverridesParser.create().parse_override(body if "=" in body else f"{body}=null")
    except HydraException as error:
        raise ConfigError(f"command line: cannot read {word!r}: {str(error).splitlines()[0]}") from None


def _values(override: Override, key: str, config_dirs: Sequence[Path]) -> list[str]:
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(sorted(groups(config_dirs).get(key, {})))
    return list(override.sweep_string_iterator())
