"""Mutated manifests are accepted or refused as a user's mistake, within limits of CPU time and memory.

`CARAMBA_MANIFEST_SAMPLES=10000` draws as many; a case follows from its seed and number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from caramba.config.estimate import as_json, plan, render_text
from caramba.errors import CarambaError
from caramba.launch.freeze import freeze
from tests import examples
from tests.limits import TooSlow, limited_cpu, limited_memory
from tests.unit.config.manifest_mutations import make_case, originals

SEED, SAMPLES = 21, int(os.environ.get("CARAMBA_MANIFEST_SAMPLES", "1000" if examples.is_thorough else "50"))
CPU_S = 20.0  # 1.3 at most on an idle core
MEMORY_BYTES, LONGEST_MESSAGE = 500 << 20, 2000


def compile_manifest(overrides: Sequence[str], folders: Sequence[Path] = ()) -> None:
    """Do what `caramba compile` does with a manifest alone: no data, weights or environment are looked at."""
    frozen = freeze(overrides, folders)
    experiment = plan(frozen.manifest, command="x", fit=frozen.fit)
    render_text(experiment)
    json.dumps(as_json(experiment), allow_nan=False)


def refusal_of(overrides: Sequence[str], folders: Sequence[Path], cpu_s: float = CPU_S) -> str:
    """Return the message that refuses a manifest, empty if it is accepted; anything else is raised."""
    try:
        with limited_cpu(cpu_s), limited_memory(MEMORY_BYTES):
            compile_manifest(overrides, folders)
    except CarambaError as error:
        if error.exit_status != 2:
            raise
        return str(error)
    return ""


def test_mutated_manifests_are_accepted_or_refused_as_a_mistake(tmp_path: Path) -> None:
    sources = originals()
    accepted, naming = 0, []
    for index in range(SAMPLES):
        case = make_case(sources, SEED, index)
        try:
            message = refusal_of(*case.write(tmp_path))
        except (Exception, TooSlow) as error:
            raise AssertionError(f"case {index}, {', '.join(case.kinds)}: {type(error).__name__}") from error
        assert len(message) <= LONGEST_MESSAGE, f"case {index}: {message}"
        assert message.replace("\n", "").replace("\t", "").isprintable() or not message, f"case {index}: {message!r}"
        accepted += not message
        if message and case.key is not None:
            naming.append(case.key in message)
    assert accepted > 1, "how many of one seed are valid moves with each key that is added"
    assert SAMPLES - accepted > 30
    assert sum(naming) >= 0.8 * len(naming), "refusals of one changed place name its key"


def test_a_crash_and_a_slow_manifest_are_not_taken_for_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise TypeError("x")

    def hang(*_: object) -> None:
        while True:
            pass

    for put_in, error in ((crash, TypeError), (hang, TooSlow)):
        monkeypatch.setattr("tests.unit.config.test_mutations.compile_manifest", put_in)
        with pytest.raises(error):
            refusal_of([], [], cpu_s=0.05)
