"""Measurements of cache formats on disk: written whole, read by the next call of the same model on the same machine."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from caramba.config.kvcache import KVCacheKind
from caramba.errors import ConfigError
from caramba.infer.policy_measure import Quality
from caramba.runs.files import home, write_json

FORMAT = 1


@dataclass
class MeasuredFormat:
    """What is known of one format so far: its quality, and the seconds of a decode step."""

    quality: Quality | None = None
    step_s: float | None = None


class PlanFile:
    """Measurements by format, valid for exactly the facts that they were made under.

    Without a path the file's name carries the hash of the facts; a named file of other facts is measured again and
    replaced.
    """

    def __init__(self, facts: dict[str, Any], path: str | None) -> None:
        self.facts = facts
        self.key = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
        default = home() / "runtime_plans" / f"cache-{self.key[:16]}.json"
        self.path = default if path is None else Path(path).expanduser()

    def load(self) -> dict[KVCacheKind, MeasuredFormat]:
        """Return what was measured under these facts; nothing where the file is of others or not there.

        Raises:
            ConfigError: the file is no plan of a cache.
        """
        try:
            content = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError) as error:
            raise self._damaged(error) from None
        try:
            raw = json.loads(content)
            if raw["format"] != FORMAT:
                raise ValueError(f"format {raw['format']}, expected {FORMAT}")
            if raw["key"] != self.key:
                return {}
            return {KVCacheKind(kind): _measured(item) for kind, item in raw["kinds"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._damaged(error) from None

    def refuse_unwritable(self) -> None:
        """See that `save` has a place, before anything is measured for it.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            problem = "a folder" if self.path.is_dir() else ""
            problem = problem or ("" if os.access(self.path.parent, os.W_OK) else "its folder is read-only")
        except OSError as error:
            problem = str(error)
        if problem:
            raise ConfigError(
                f"{self.path}: what is measured of a cache cannot be written there ({problem}); name another "
                "cache_plan_path"
            )

    def save(self, kinds: dict[KVCacheKind, MeasuredFormat], decision: dict[str, Any]) -> None:
        """Write what is known, and the last decision that was made from it, for people."""
        listed = {kind.value: numbers(asdict(item)) for kind, item in kinds.items()}
        write_json(
            self.path,
            {
                "format": FORMAT,
                "key": self.key,
                "facts": self.facts,
                "kinds": listed,
                "last_decision": decision,
            },
        )

    def _damaged(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.path}: not a plan of a cache ({type(error).__name__}: {error}); delete it, or measure again with "
            "cache_plan=refresh"
        )


def numbers(value: Any) -> Any:
    """Return a value as JSON holds it: NaN and infinity become None."""
    if isinstance(value, dict):
        return {key: numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [numbers(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _measured(item: dict[str, Any]) -> MeasuredFormat:
    quality, step_s = item["quality"], item["step_s"]
    if step_s is not None and not step_s > 0:
        raise ValueError(f"step_s is {step_s}, expected seconds")
    if quality is None:
        return MeasuredFormat(None, step_s)
    known = {field.name for field in fields(Quality)}
    if set(quality) != known:
        raise ValueError(f"quality has {sorted(quality)}, expected {sorted(known)}")
    values: dict[str, Any] = {}
    for name, value in quality.items():
        if name == "problem":
            values[name] = str(value)
        elif name == "needle_depths":
            values[name] = tuple(
                (float(depth), bool(found), math.nan if kl is None else float(kl))
                for depth, found, kl in value
            )
        else:
            values[name] = math.nan if value is None else float(value)
    return MeasuredFormat(Quality(**values), step_s)
