"""Every key of a manifest is described, for people and for editors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from caramba.config.composition import PartialPhase
from caramba.config.generate import EngineConfig, SpeculativeConfig
from caramba.config.schema import json_schema, key_table

MOST_WORDS = 60


def properties() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (Section.key, property) for the manifest, every node, and the schemas of commands."""
    manifest = json_schema()
    commands = [model.model_json_schema() for model in (EngineConfig, SpeculativeConfig, PartialPhase)]
    sections = {"Manifest": manifest, **manifest["$defs"], **{item["title"]: item for item in commands}}
    for name, section in sections.items():
        for key, item in section.get("properties", {}).items():
            yield f"{name}.{key}", item


def test_schema_keys_are_all_described() -> None:
    found = dict(properties())
    assert len(found) > 500
    missing = [name for name, item in found.items() if not item.get("description", "").strip()]
    assert not missing, "add Field(description=...): what the key does, its units, and what the default means"


def test_schema_descriptions_are_short_and_their_own() -> None:
    for name, item in properties():
        text = item["description"]
        assert 2 <= len(text.split()) <= MOST_WORDS or name.endswith(("compiled", "DebugConfig.name")), name
        key = name.partition(".")[2]
        assert text.strip().lower() != key.replace("_", " "), name


@pytest.mark.parametrize("key", ["sem_dim", "fail_fast", "steps", "vocab_size", "teacher_cache_max_gb"])
def test_key_table_row_has_the_description(key: str) -> None:
    notes = [note for _, name, _, note in key_table() if name == key]
    assert notes
    assert all(notes)
