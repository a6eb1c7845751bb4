"""Every command and flag has a help sentence, and the sentence states the parser's default."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from pydantic_core import PydanticUndefined

from caramba.cli import main
from caramba.config.benchmark import CalibrationConfig
from caramba.config.generate import EngineConfig, GenerateConfig, SpeculativeConfig
from caramba.launch import overrides
from caramba.launch.commands.help import FLAGS
from caramba.launch.commands.table import COMMANDS, COMMON

# Words that reach the parser; the other commands read their few flags by hand.
PARSED = {
    "status": [],
    "collect": [],
    "compare": [],
    "studio": [],
    "tag": [],
    "note": [],
    "export": [],
    "eval": [],
    "generate": [],
    "chat": [],
    "serve": [],
    "prepare": ["text"],
    "tune": [],
    "paper": [],
    "research": [],
    "review": [],
    "rm": [],
}
BY_HAND = {
    "run": ["--group"],
    "compile": ["--group", "--print-plan", "--json"],
    "resume": [],
    "rerun": [],
    "doctor": [],
    "init": [],
    "schema": ["--json"],
}


class Reached(Exception):  # noqa: N818
    """The parser that a command has built."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def actions_of(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield every option of a parser and of its subparsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from actions_of(inner)
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            yield action


def parser_of(command: str, monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    def stop(self: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise Reached(self)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr("caramba.cli.run_command", lambda call, is_debug: call())
    with pytest.raises(Reached) as reached:
        main([command, *PARSED[command]])
    return reached.value.parser


def test_commands_are_all_parsed_or_listed() -> None:
    assert {*PARSED, *BY_HAND, "launch"} == set(COMMANDS)
    assert {name for name, command in COMMANDS.items() if command.flags} == set(COMMANDS) - {"launch"}


@pytest.mark.parametrize("command", PARSED)
def test_parser_flags_have_help_with_their_default(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    actions = list(actions_of(parser_of(command, monkeypatch)))
    flags = {action.option_strings[-1] for action in actions}
    # Two commands remove --quiet and --debug before their parser reads the words.
    assert set(COMMANDS[command].flags) - flags <= set(COMMON)
    assert flags <= set(COMMANDS[command].flags)
    for action in actions:
        flag = action.option_strings[-1]
        sentence = COMMANDS[command].flags[flag]
        if action.nargs == 0 or flag in COMMON:
            continue
        if action.required:
            assert "required" in sentence, flag
        elif action.default not in (None, [], ""):
            if command == "prepare" and flag == "--tokenizer":
                continue  # stdlib has another default, which the sentence does not repeat
            assert f"default {action.default}" in sentence, flag
        else:
            assert "default" in sentence or "may be repeated" in sentence, flag
        if action.choices:
            assert all(choice in sentence for choice in action.choices) or command == "prepare", flag


@pytest.mark.parametrize("command", BY_HAND)
def test_hand_parsed_flags_have_help(command: str) -> None:
    assert set(COMMANDS[command].flags) == {*BY_HAND[command], *COMMON}


@pytest.mark.parametrize(
    ("command", "schema", "prefix"),
    [
        ("generate", GenerateConfig, ""),
        ("generate", SpeculativeConfig, ""),
        ("generate", CalibrationConfig, "weights-calibration-"),
        ("serve", EngineConfig, ""),
    ],
)
def test_flag_defaults_are_those_of_the_schema(command: str, schema: type, prefix: str) -> None:
    checked = 0
    for name, field in schema.model_fields.items():
        sentence = COMMANDS[command].flags.get(f"--{prefix}{name.replace('_', '-')}")
        if sentence is None or field.default in (None, (), PydanticUndefined):
            continue
        if name in ("spec_method", "decode_q_chunk", "max_len"):
            continue  # off, or follows from the model, unless the flag is set
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        assert f"default {default}" in sentence, name
        checked += 1
    assert checked >= 2


def test_launch_flags_are_those_that_its_parser_takes() -> None:
    described = " ".join(flag for flag, _ in FLAGS)
    for flag in (*overrides.FLAGS, *overrides.NATIVE):
        if flag.startswith("--") and flag not in ("--help", "--version"):
            assert flag in described, flag


@pytest.mark.parametrize("command", [*PARSED, *BY_HAND])
def test_help_shows_a_sentence_for_every_flag(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for flag, sentence in COMMANDS[command].flags.items():
        assert sentence[0].isupper(), flag
        assert sentence.endswith("."), flag
        assert sentence in " ".join(text.split()), flag
    assert max(len(line) for line in text.splitlines()) <= 102
