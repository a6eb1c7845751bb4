"""Anchors and references that expand to more than a manifest may hold are refused before anything is built."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from caramba.cli import main
from caramba.config.resolve import MOST_OPTION_BYTES, load_nodes, load_tree, read_text, resolve
from caramba.errors import ConfigError
from caramba.launch.freeze import freeze

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
    with pytest.raises(ConfigError, match="nests deeper than 64 levels"):
        load_nodes("[" * depth + "]" * depth, "m.yaml")


def test_resolve_refuses_deep_trees() -> None:
    tree: dict = {"x": 1}
    for _ in range(300):
        tree = {"x": tree}
    with pytest.raises(ConfigError, match="nests deeper than 64 levels"):
        resolve(tree)


def test_load_nodes_names_the_key_that_nests_too_deep() -> None:
    deep = "name: m\nmodel:\n  head: " + "[" * 90 + "]" * 90
    with pytest.raises(ConfigError, match=r"^m\.yaml:3: model\.head\[0\].*: nests deeper than 64 levels"):
        load_nodes(deep, "m.yaml")


@pytest.mark.parametrize("number", ["9" * 5_000, "0x" + "f" * 5_000, "-" + "1" * 101])
def test_load_nodes_refuses_a_giant_number_by_key(number: str) -> None:
    with pytest.raises(ConfigError, match=r"^m\.yaml:1: seed: a whole number of .* digits, expected at most 100"):
        load_nodes(f"seed: {number}", "m.yaml")


def test_load_tree_reads_scalars_as_omegaconf_does() -> None:
    text = "a: 1e3\nb: 2024-01-01\nc: 1_000\nd: 1.5e-3\ne: .5\nf: yes\ng: ~\nh: 0x10\ni: '1'\nj: 1e-3\nk: -.inf\n"
    expected = OmegaConf.to_container(OmegaConf.create(text))
    assert load_tree(text, "m.yaml") == expected
    assert load_tree("a: &a {b: 1}\nc: {<<: *a, d: 2}\n", "m.yaml") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\na: 2\n",
        "a: !!python/object:os.system {}\n",
        "a: !!set {x}\n",
        "a: !!binary aGk=\n",
        "a: !!int x",
    ],
)
def test_load_tree_refuses_what_is_no_plain_data(text: str) -> None:
    with pytest.raises((yaml.YAMLError, ValueError)):
        load_tree(text, "m.yaml")


def test_load_nodes_of_the_most_nodes_takes_under_two_seconds() -> None:
    began = time.process_time()
    with pytest.raises(ConfigError, match="expand to more than"):
        load_nodes("a: [" + "x," * 3_000_000 + "]", "m.yaml")
    assert time.process_time() - began < 2.0


def test_compose_refuses_an_option_that_hydra_would_merge_for_seconds(tmp_path: Path) -> None:
    (tmp_path / "verify").mkdir()
    option = tmp_path / "verify" / "many.yaml"
    option.write_text("checks:\n" + "  - {type: compare, id: x}\n" * 1_200)
    with pytest.raises(ConfigError, match="expand to more than 5,000 values"):
        freeze(["model=tiny_dba", "verify=many"], [tmp_path])


def test_compose_error_of_hydra_is_quoted_in_part(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "long.yaml").write_text(f"defaults:\n  - {'k' * 50_000}\n")
    with pytest.raises(ConfigError) as caught:
        freeze(["model=tiny", "train=long"], [tmp_path])
    assert len(str(caught.value)) < 2_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:" + "\n" * MOST_OPTION_BYTES, "over 250,000 bytes"),
        ("a: 1\n" + "\n" * 130_000, "expand to more than"),
        (" \n" * 124_000 + "# @package _global_", "expand to more than"),
        ("a: 1\n# @package _global_\n", "only before any other line"),
        ("\n\n # @package hydra.run\n", "a package of Hydra's own"),
    ],
)
def test_compose_checks_the_lines_of_a_long_option_in_linear_time(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "long.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):  # minutes for the first three before
        freeze(["model=tiny", "train=long"], [tmp_path])


@pytest.mark.parametrize("kind", ["folder", "dangling link", "not UTF-8", "large"])
def test_read_text_names_a_file_that_it_cannot_read(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    if kind == "folder":
        file.mkdir()
    elif kind == "dangling link":
        file.symlink_to(tmp_path / "nowhere")
    else:
        file.write_bytes(b"a: \xff" if kind == "not UTF-8" else b"a: 1234567890")
    with pytest.raises(ConfigError, match=r"^x\.yaml: "):
        read_text(file, "x.yaml", 10)
