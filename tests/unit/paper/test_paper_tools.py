"""Tool calls: none of them, whatever it holds, stops a draft."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_paper import drafted, section, whole
from tests.needs import need
from tests.paper_servers import calls, chat_server, says

from caramba.config.paper import PaperConfig
from caramba.paper.evidence import Evidence
from caramba.paper.folder import Draft
from caramba.paper.gate import Gate
from caramba.paper.literature import Literature
from caramba.paper.tools import Toolbox, call_tool

need("litellm")
pytestmark = pytest.mark.usefixtures("without_latex")

Make = Callable[..., PaperConfig]

HARMFUL = [
    (("update_section", section("abstract", "{" * 3000)), "abstract, line 1: too many groups"),
    (("read_tex_file", '{"path": "a\\u0000.tex"}'), "unknown key"),
    (("include_figure", '{"name": "\\ud83d.png", "caption": "x"}'), r"'\?\.png' is no figure"),
    (("\ud83d", "\ud83d"), "is no tool"),
    (("add_citation", '{"source_id": "\\ud83d"}'), "is no record"),
]


@pytest.mark.parametrize(("call", "message"), HARMFUL, ids=range(len(HARMFUL)))
def test_no_call_stops_a_draft(call: tuple[str, dict[str, Any] | str], message: str, config: Make, own: Path) -> None:
    with chat_server(calls(call), whole(), says("done \ud83d")) as server:
        assert drafted(config(server.url), own).version == 1
        assert re.search(message, server.results()[0]["error"])


@pytest.fixture(name="made")
def _made(config: Make, evidence: Evidence) -> Callable[[], Toolbox]:
    plain = config()
    return lambda: Toolbox(Gate(plain, evidence), Draft(), Literature(plain.citations), lambda messages: "{}")


def test_arguments_that_are_nested_too_deeply_are_refused(made: Callable[[], Toolbox]) -> None:
    for deep in ("[" * 50_000, "[" * 70 + "]" * 70 + "}"):
        answer = json.loads(call_tool("write_tex_file", '{"sections":' + deep, made().tools))
        assert answer["error"].startswith("write_tex_file: the arguments: ")


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("odd"), RecursionError("deep")], ids=repr)
def test_a_call_that_fails_in_an_unforeseen_way_is_told(
    error: Exception, made: Callable[[], Toolbox], monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_artifacts(self: Toolbox) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(Toolbox, "list_artifacts", list_artifacts)
    assert json.loads(call_tool("list_artifacts", "{}", made().tools))["error"].startswith("list_artifacts: ")
