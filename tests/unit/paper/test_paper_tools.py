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
from caramba.paper.folder import Draft, PaperFolder
from caramba.paper.gate import Gate
from caramba.paper.literature import Literature
from caramba.paper.tools import ListArtifacts, Toolbox

need("litellm")
pytestmark = pytest.mark.usefixtures("without_latex")

Make = Callable[..., PaperConfig]

HARMFUL = [
    (("update_section", section("abstract", "{" * 3000)), "abstract, line 1: more than 60 groups"),
    (("read_tex_file", '{"path": "a\\u0000.tex"}'), "cannot be read|no .tex"),
    (("read_tex_file", {"path": "a" * 300 + ".tex"}), "cannot be carried out|no .tex"),
    (("read_tex_file", '{"path": "\\ud83d.tex"}'), r"'\?\.tex' is no .tex or .bib file"),
    (("\ud83d", "\ud83d"), "there is no tool"),
    (("add_citation", '{"source_id": "\\ud83d"}'), "is no record"),
]


@pytest.mark.parametrize(("call", "message"), HARMFUL, ids=range(len(HARMFUL)))
def test_no_call_stops_a_draft(call: tuple[str, dict[str, Any] | str], message: str, config: Make, own: Path) -> None:
    with chat_server(calls(call), whole(), says("done \ud83d")) as server:
        assert drafted(config(server.url), own).version == 1
        assert re.search(message, server.results()[0]["error"])


@pytest.fixture(name="box")
def _box(config: Make, evidence: Evidence, tmp_path: Path) -> Toolbox:
    plain = config()
    folder, literature = PaperFolder(tmp_path / "new"), Literature(plain.citations)
    return Toolbox(Gate(plain, evidence), Draft(), folder, literature, lambda messages: "{}")


def test_arguments_that_are_nested_too_deeply_are_refused(box: Toolbox) -> None:
    answer = json.loads(box.call("write_tex_file", '{"sections":' + "[" * 50_000))
    assert answer["error"].startswith("write_tex_file: the arguments are no JSON")


@pytest.mark.parametrize("error", [OSError("disk"), ValueError("odd"), RecursionError("deep")], ids=repr)
def test_a_call_that_fails_in_an_unforeseen_way_is_told(
    error: Exception, box: Toolbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: object) -> dict[str, Any]:
        raise error

    monkeypatch.setattr(ListArtifacts, "answer", failing)
    assert json.loads(box.call("list_artifacts", "{}"))["error"].startswith("list_artifacts: ")
