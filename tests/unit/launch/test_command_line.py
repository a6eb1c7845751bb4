"""What the command line prints can be copied back into a shell, and what it refuses names the key that was meant."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from caramba.cli import main
from caramba.config.composition import Composition
from caramba.launch.config_files import groups
from caramba.runs.shell import join_words, show_path

MODEL = ("model=tiny", "train=pretrain", "benchmark=none", "verify=none", "device=cpu")
ODD = [
    "a b",
    "it's",
    '"',
    "$HOME `id`",
    "\x1b[2J",
    "line\nbreak",
    "tab\t\\",
    "é",
    "\x9b",
    "",
    "*",
    "~",
    "a=[1,2]",
]


def words_of(line: str) -> list[str]:
    """Return the words that bash makes of a line."""
    code = f"printf '%s\\0' {line}"
    return subprocess.run(["bash", "-c", code], capture_output=True, check=True).stdout.decode().split("\0")[:-1]


def test_join_words_parses_back_in_a_shell():
    line = join_words(ODD)
    assert words_of(line) == ODD
    assert line.isprintable(), "one line without control characters"


def test_show_path_with_spaces_parses_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words_of(show_path(tmp_path / "my runs" / "a")) == ["my runs/a"]
    assert words_of(show_path(Path("/else where/a"))) == ["/else where/a"]


@pytest.mark.parametrize("count", [0, 1, 40])
def test_compile_run_line_is_whole_and_parses_back(capsys, count):
    """Trap: the line was wrapped at 110 columns, and a copy of it lost the overrides of the second line."""
    words = [
        *MODEL,
        """notes="it's a note of more than one word\"""",
        *(f"vars.x{number}=[{number},2]" for number in range(count)),
    ]
    assert main(["compile", *words]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Run it: ")]
    assert words_of(line.removeprefix("Run it: ")) == ["python", "-m", "caramba.launch", *words]


def test_compile_print_plan_with_json_prints_both(capsys):
    assert main(["compile", *MODEL, "--json"]) == 0
    alone = capsys.readouterr()
    assert main(["compile", *MODEL, "--json", "--print-plan"]) == 0
    both = capsys.readouterr()
    assert json.loads(both.out) == json.loads(alone.out)
    assert (alone.err, "Plan of" in both.err) == ("", True)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["compile", "--manifest", "x.yaml"], "--manifest; a key has no dashes: manifest=x.yaml; see --help"),
        (["launch", "--manifest=x.yaml"], "a key has no dashes: manifest=x.yaml;"),
        (["launch", "--train.steps", "4"], "a key has no dashes: train.steps=4;"),
        (["launch", "--print-plan"], "caramba compile prints the plan;"),
        (["launch", "--quite"], "did you mean '--quiet'?"),
        (["launch", "--zzz"], "unknown option --zzz; see --help"),
    ],
)
def test_unknown_option_names_what_was_meant(capsys, words, text):
    assert main(words) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("key", sorted({*Composition.model_fields, *groups()}))
def test_unknown_option_of_each_key_names_that_key(capsys, key):
    assert main(["launch", f"--{key}=1"]) == 2
    assert f"a key has no dashes: {key}=1;" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("caramba generate lat", ["latest"]),
        ("caramba gen", ["generate"]),
        ("caramba prepare text ", []),
        ("caramba launch word mod", []),
        ("caramba launch model=tiny_dba_per", ["model=tiny_dba_per_head"]),
        ("caramba compile model=tiny_dba_per", ["model=tiny_dba_per_head"]),
    ],
)
def test_completion_prints_candidates_and_no_errors(tmp_path, monkeypatch, capsys, line, expected):
    """Trap: TAB behind `caramba generate lat` printed Hydra's errors into the line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMP_LINE", line)
    monkeypatch.setattr("sys.argv", ["caramba"])
    assert main(["-sc", "query=bash"]) == 0
    said = capsys.readouterr()
    assert (said.out.split(), said.err) == (expected, "")


@pytest.mark.parametrize("key", ["sk-abc123", "AKIAIOSFODNN7EXAMPLE", "a b", "hf_secretsecret"])
def test_key_env_that_is_a_key_is_not_printed(tmp_path, monkeypatch, capsys, key):
    monkeypatch.chdir(tmp_path)
    main(["launch", *MODEL, f"paper.api.key_env='{key}'", "paper.enabled=true", "paper.model=openai/x"])
    said = capsys.readouterr()
    assert key not in said.err + said.out
    assert "key_env" in said.err


def test_compile_in_a_pipe_cuts_no_table(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trap: stages were printed 110 columns wide, and steps of 113 ended with an ellipsis."""
    assert main(["compile"]) == 0
    printed = capsys.readouterr().out
    assert "6.85 TFLOP" in printed
    assert "…" not in printed
