"""The generated reference is complete: every key, flag, file and metric has one place and one sentence."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from caramba.config.schema import json_schema
from caramba.evaluation.latency import UNITS as LATENCY_UNITS
from caramba.evaluation.weights import UNITS as WEIGHTS_UNITS
from caramba.experiment.ladder import UNITS as LADDER_UNITS
from caramba.launch.commands.table import COMMANDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages() -> Iterator[dict[str, ModuleType]]:
    """The modules that write the reference."""
    folder = str(ROOT / "scripts/docs")
    sys.path.insert(0, folder)
    import catalogue
    import command_pages
    import op_pages
    import schema_pages

    yield {module.__name__: module for module in (catalogue, command_pages, op_pages, schema_pages)}
    sys.path.remove(folder)


def test_every_key_is_on_one_page_with_a_sentence(pages: dict[str, ModuleType]) -> None:
    schema = json_schema()
    tables = [schema, *schema["$defs"].values()]
    keys = [(key, item) for table in tables for key, item in table.get("properties", {}).items()]
    assert len(keys) > 400
    assert not [key for key, item in keys if not item.get("description", "").strip()]
    text = "\n".join(pages["schema_pages"].pages().values())
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len(keys)
    assert all(line.rstrip(" |").count("|") >= 4 for line in rows)
    assert set(pages["schema_pages"].assign_pages(schema)) == set(schema["$defs"])


def test_every_command_and_flag_has_a_sentence(pages: dict[str, ModuleType]) -> None:
    text = pages["command_pages"].commands()
    for command in COMMANDS:
        assert f"{{ #{command} }}" in text
    for command, flags in ((name, entry.flags) for name, entry in COMMANDS.items()):
        for flag, sentence in flags.items():
            assert len(sentence.split()) >= 2, (command, flag)
            assert f"| `{flag}` |" in text


def test_every_op_has_a_function_and_a_schema(pages: dict[str, ModuleType]) -> None:
    ops = pages["op_pages"]
    text = ops.page()
    by_module = ops.ops_by_module()
    assert sum(map(len, by_module.values())) > 40
    for module, names in by_module.items():
        assert ops.public_functions(importlib.import_module(module)), module
        assert all(f"caramba::{name}(" in text for name in names)
    assert ops.kernels_of("caramba.ops.rms_norm", ["rms_norm"]) == ["triton", "metal"]


@pytest.mark.parametrize(
    "key",
    [
        *(f"latency.student.{name}@prompt=1,gen=2,batch=3" for name in LATENCY_UNITS),
        *(f"weights.student.{name}@weights=int8" for name in WEIGHTS_UNITS),
        *(f"ladder.tiny.{name}@row=base,batch=1,accumulate=1,block=8" for name in LADDER_UNITS),
    ],
)
def test_metrics_of_the_code_are_in_the_catalogue(pages: dict[str, ModuleType], key: str) -> None:
    assert len(pages["catalogue"].matching("metrics", key)) == 1


def test_a_key_that_is_not_in_the_catalogue_matches_nothing(pages: dict[str, ModuleType]) -> None:
    assert not pages["catalogue"].matching("metrics", "latency.student.unknown@prompt=1,gen=2,batch=3")
    assert not pages["catalogue"].matching("run", "checkpoints/pretrain.tmp")
