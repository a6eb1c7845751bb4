"""`--multirun`: every combination of the values given, all checked before the first runs, each its own run."""

from __future__ import annotations

import itertools
import sys

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from caramba.config.manifest import Manifest
from caramba.errors import CarambaError, ConfigError
from caramba.launch.argv import Request
from caramba.launch.groups import groups
from caramba.launch.refuse import refuse_words
from caramba.launch.run import prepare, start
from caramba.runs.ending import INTERRUPTED, end


def points(overrides: list[str]) -> list[list[str]]:
    """Expand `a=1,2`, `choice(…)`, `range(…)` and `glob(…)` into one list of overrides per combination.

    Raises:
        ConfigError: a text that Hydra cannot read, or an interval, which has no finite set of values.
    """
    refuse_words(overrides)
    axes: list[list[str]] = []
    for word in overrides:
        sign = "" if word[:1].isalnum() else word[: len(word) - len(word.lstrip("+~"))]
        body = word[len(sign) :]
        try:
            override = OverridesParser.create().parse_override(body if "=" in body else f"{body}=null")
        except HydraException as error:
            raise ConfigError(f"command line: cannot read {word!r}: {str(error).splitlines()[0]}") from None
        if sign == "~" or not override.is_sweep_override():
            axes.append([word])
            continue
        if override.is_interval_sweep():
            raise ConfigError(
                f"command line: {word}: an interval has no finite set of values; use choice(…) or range(…)"
            )
        key = body.partition("=")[0]
        axes.append([f"{sign}{key}={value}" for value in _values(override, key)])
    return [list(point) for point in itertools.product(*axes)]


def _values(override: object, key: str) -> list[str]:
    from hydra.core.override_parser.types import Glob, Override

    assert isinstance(override, Override)
    value = override.value()
    if isinstance(value, Glob):
        return value.filter(sorted(groups().get(key, {})))
    return list(override.sweep_string_iterator())


def run_sweep(request: Request) -> int:
    """Check every point, run each in order, and report the failed ones at the end."""
    sweep = points(request.overrides)
    ready: list[tuple[str, Manifest, tuple[str, ...]]] = []
    for point in sweep:
        name = " ".join(point)
        try:
            manifest, frozen = prepare(point, request.config_dirs)
        except CarambaError as error:
            raise type(error)(f"point {name!r} of the sweep: {error}\nnothing was started") from None
        ready.append((name, manifest, frozen.overrides))
    failed: list[str] = []
    for number, (name, manifest, overrides) in enumerate(ready, start=1):
        print(f"[{number}/{len(ready)}] {name}", file=sys.stderr)
        status = end(lambda m=manifest, o=overrides: start(m, o, request), is_debug=request.is_debug)
        if status == INTERRUPTED:
            print(f"stopped after {number - 1} of {len(ready)} points", file=sys.stderr)
            return INTERRUPTED
        if status:
            failed.append(f"{name} (exit status {status})")
    if failed:
        print(f"{len(failed)} of {len(ready)} points failed:\n  " + "\n  ".join(failed), file=sys.stderr)
    return 1 if failed else 0
