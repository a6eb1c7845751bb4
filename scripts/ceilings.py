"""Counts that may only fall, in ceilings.json: findings of the language lint, walks, packages and import circles."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_name("ceilings.json")


def read_ceilings(section: str, file: Path = FILE) -> dict[str, int]:
    """Return the ceilings of a section, empty before the first update."""
    return json.loads(file.read_text()).get(section, {}) if file.is_file() else {}


def lower_ceilings(section: str, counts: Mapping[str, int], *, replace_keys: bool = False, file: Path = FILE) -> None:
    """Set each ceiling to the lower of itself and its count; a name without a ceiling takes its count.

    With `replace_keys`, names that are not in `counts` go.
    """
    data = json.loads(file.read_text()) if file.is_file() else {}
    before = data.get(section, {})
    lowered = {name: min(count, before.get(name, count)) for name, count in counts.items()}
    kept = {} if replace_keys else before
    data[section] = dict(sorted({**kept, **lowered}.items()))
    file.write_text(json.dumps(dict(sorted(data.items())), indent=2) + "\n")
