"""Anchors and references that expand to more than a manifest may hold are refused before anything is built."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from caramba.cli import main
from caramba.config.expansion import load_nodes
from caramba.config.resolve import resolve
from caramba.errors import ConfigError

ANCHORS = "name: m\nmodel: {}\nvars:\n  a0: &a0 [x]\n" + "".join(
    f"  a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)
REFERENCES = "name: m\nmodel: {}\nvars:\n  a0: [x]\n" + "".join(
    f"  a{i}: [" + ",".join([f"'${{vars.a{i - 1}}}'"] * 10) + "]\n" for i in range(1, 9)
)
TEXTS = "name: m\nmodel: {}\nvars:\n  a0: xxxxxxxxxx\n" + "".join(
    f"  a{i}: '{''.join([f'${{vars.a{i - 1}}}'] * 10)}'\n" for i in range(1, 9)
)


@pytest.mark.parametrize("text", [ANCHORS, REFERENCES, TEXTS], ids=["anchors", "references", "texts"])
def test_compile_refuses_an_expansion_bomb_with_status_2(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    began = time.process_time()
    assert main(["compile", str(file)]) == 2
    assert time.process_time() - began < 5.0  # 38 s for five levels of anchors before
    assert "expand to more than" in capsys.readouterr().err


def test_load_nodes_takes_anchors_within_the_limits() -> None:
    assert load_nodes("a: &a [1, 2]\nb: [*a, *a]\n", "m.yaml") is not None
    assert load_nodes("", "m.yaml") is None


def test_load_nodes_refuses_an_anchor_that_contains_itself() -> None:
    with pytest.raises(ConfigError, match=r"m\.yaml:1: an anchor contains itself"):
        load_nodes("a: &a [1, *a]\n", "m.yaml")


@pytest.mark.parametrize("depth", [200, 20_000])
def test_load_nodes_refuses_deep_nesting(depth: int) -> None:
    with pytest.raises(ConfigError, match="nests deeper than 100 levels"):
        load_nodes("[" * depth + "]" * depth, "m.yaml")


def test_resolve_refuses_deep_trees() -> None:
    tree: dict = {"x": 1}
    for _ in range(300):
        tree = {"x": tree}
    with pytest.raises(ConfigError, match="nests deeper than 100 levels"):
        resolve(tree)
