"""Ranks share what they can do alike; the rest is refused before a model loads."""

from __future__ import annotations

import pytest

from caramba.cli import main

TEXT = ("RUN", "--prompt", "a")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("generate", *TEXT, "--cache-kind", "auto"),
            "--cache-kind auto does not go with 2 ranks: each rank would",
        ),
        (
            ("generate", *TEXT, "--spec-method", "draft", "--draft", "D"),
            "--spec-method draft does not go with 2 ranks",
        ),
        (
            ("generate", *TEXT, "--weights", "int8", "--weights-head"),
            "--weights-head does not go with 2 ranks",
        ),
        (
            ("chat", "RUN"),
            "chat: 2 ranks were started, and chat runs as one process; start it without torchrun",
        ),
    ],
)
def test_what_ranks_would_each_decide_is_refused(
    words: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*words]) == 2
    assert message in capsys.readouterr().err
