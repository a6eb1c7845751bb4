"""Values of a wrong type in a manifest file end with status 2 and the key, not with a TypeError."""

from __future__ import annotations

from pathlib import Path

import pytest

from caramba.cli import main

MANIFEST = """\
name: m
model:
  embedder: {vocab_size: 257, d_model: 8}
  topology: {type: StackedTopology, layers: [{type: RMSNormLayer, d_model: 8}]}
groups:
  - name: g
    data: {type: stdlib, vocab_size: 257}
    runs: [{id: %s, train: {phase: pretrain, steps: 1}}]
"""


@pytest.mark.parametrize(("value", "found"), [("[1]", "a list"), ("{a: 1}", "a mapping"), ("5", "5")])
def test_compile_refuses_a_run_id_of_wrong_type_by_key(
    value: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "manifest.yaml"
    file.write_text(MANIFEST % value)
    assert main(["compile", str(file)]) == 2
    assert f"groups[0].runs[0].id: got {found}, expected a valid string" in capsys.readouterr().err
