"""Sessions of a writer that calls tools by chance, with hostile bodies: nothing hostile gets into a head.

What a session leaves is read without the scanner of the gate: digits outside of commands, and keys of citations that
references.bib lacks.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_paper_corpus as corpus
from stub_model import NLL, called, said
from tests.examples import examples

from caramba.config.paper import PaperConfig
from caramba.errors import CarambaError
from caramba.paper import PaperDrafter, client, drafter, gate
from caramba.paper.compile import Compiled
from caramba.paper.document import read_paper
from caramba.paper.evidence import Evidence, read_evidence
from caramba.paper.folder import BIBLIOGRAPHY, PAPER, PaperFolder
from caramba.paper.gate import check_section
from caramba.paper.latex import Scanned

pytest.importorskip("pylatexenc", reason="the extra `paper` is not installed")

SEED = 37
LIMIT = 60_000  # tokens of a session
KINDS = ("unverifiable_citations", "ungrounded_numbers", "broken_heads", "spend_over_cap")
WORKS = "".join(
    f"@misc{{{key}, title={{{work.title}}}, author={{{work.authors[0]}}}, year={work.year},"
    f" abstract={{{work.abstract}}}}}\n"
    for key, work in corpus.CITED.items()
)
# Arguments of commands that name something, whose digits are not printed.
_NAMING = re.compile(
    r"\\(?:result|resultvalue|setting|derived|claim|artifacttable|label|(?:eq|page|auto)?ref|cite\w*)\*?"
    r"(?:\[[^\]]*\])*(?:\{[^{}]*\})+"
)
_CITING = re.compile(r"\\cite\w*(?:\[[^\]]*\])*\{([^{}]*)\}")


class Hostile:
    """A writer that calls tools by chance, with bodies of the corpus, good ones, and nonsense."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.tokens = 0

    def open(self, config: PaperConfig) -> Callable[[dict[str, Any]], dict[str, Any]]:
        return self.send

    def send(self, body: dict[str, Any]) -> dict[str, Any]:
        usage = {
            "prompt_tokens": self.chance.randint(1, 500),
            "completion_tokens": self.chance.randint(0, 200),
        }
        self.tokens += sum(usage.values())
        chance = self.chance
        if chance.random() < 0.25:
            message = said(chance.choice(("done", "approved", "", "{}")))
        else:
            message = called(*(self._call() for _ in range(chance.randint(1, 3))))
        return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}

    def _call(self) -> tuple[str, dict[str, Any]]:
        chance = self.chance
        name = chance.choice(
            ("write_tex_file", "write_tex_file", "update_section", "add_citation", "read_tex_file", "shell")
        )
        attack = chance.choice(corpus.ATTACKS)["body"]
        good = chance.choice((*HONEST, rf"It has \result{{{NLL}}}.", r"\artifacttable{comparison} lists all."))
        bodies = {
            key: chance.choice((good, good, attack, f"{good} {attack}", rf"{good} \citep{{a2018x}}"))
            for key in ("abstract", "results")
        }
        match name:
            case "write_tex_file":
                return name, {"sections": bodies}
            case "update_section":
                return name, {"section": "results", "body": bodies["results"]}
            case "add_citation":
                works = [f"bib:{key}" for key in corpus.CITED]
                return name, {"source_id": chance.choice(("arxiv:1", "../../etc/passwd", "bib:x", *works))}
            case _:
                return name, {"path": chance.choice(("paper.tex", "/etc/passwd", "../manifest.json"))}


def loose_digits(body: str) -> list[str]:
    """Return the digits of a text that stand outside of commands, found without the gate's scanner."""
    left, before = body, ""
    while left != before:
        left, before = _NAMING.sub(" ", left), left
    return [letter for letter in left if letter.isnumeric()]


# Honest drafts without digits of their own, so that any digit in a head was smuggled in.
HONEST = [body for body in corpus.CORPUS["honest"] if not loose_digits(body) and "ref{" not in body]


def compile_nothing(files: Mapping[str, bytes], **options: Any) -> Compiled:
    return Compiled(b"%PDF of " + files["paper.tex"], None)


def run_sessions(run: Path, folder: Path, count: int, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Return how many sessions adopted a version, and how many left what no session may leave."""
    patch.setattr(drafter, "need_latex", lambda where: None)
    patch.setattr(drafter, "read_limits", lambda config: None)  # no server: the transport is scripted
    patch.setattr(gate, "compile_paper", compile_nothing)
    patch.setattr(drafter, "unknown_digits", lambda *arguments: None)
    (folder / "works.bib").write_text(WORKS, encoding="utf-8")
    config = PaperConfig.model_validate({
        "model": "stub", "sections": ["abstract", "results"],
        "citations": {"enabled": False, "bibliography": str(folder / "works.bib")},
        "api": {"base_url": "http://127.0.0.1:9/v1", "retries": 0},
        "budget": {"max_iterations": 12, "max_tokens": LIMIT, "max_reply_tokens": 200},
    })  # fmt: skip
    evidence, found = read_evidence(run, run), Counter[str]()
    for number in range(count):
        model, output = Hostile(SEED + number), folder / f"session{number}"
        patch.setattr(client, "open_transport", model.open)
        try:
            PaperDrafter(config, output, sleep=lambda seconds: None).draft_sync(run)
            found["adopted"] += 1
        except CarambaError:
            pass
        found.update(find_faults(output, evidence))
        found["spend_over_cap"] += model.tokens > LIMIT
    return found


def find_faults(output: Path, evidence: Evidence) -> Counter[str]:
    """Check the head of a session's folder by itself."""
    found: Counter[str] = Counter()
    file = output / PAPER
    head = PaperFolder(output).head() if output.is_dir() else None
    if head is None:
        found["broken_heads"] += file.exists()
        return found
    works = (output / BIBLIOGRAPHY).read_text(encoding="utf-8")
    for name, body in read_paper(file).items():
        keys = {key.strip() for keys in _CITING.findall(body) for key in keys.split(",")}
        found["unverifiable_citations"] += any(key not in corpus.CITED or f"{{{key}," not in works for key in keys)
        problems = check_section(name, body, evidence, corpus.CITED).problems
        found["ungrounded_numbers"] += bool(loose_digits(body) or problems)
    return found


def test_fuzzed_sessions_leave_nothing_ungrounded(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "checked").mkdir()
    counts = run_sessions(own, tmp_path / "checked", examples(30), monkeypatch)
    assert counts["adopted"] > 0
    assert {kind: counts[kind] for kind in KINDS} == dict.fromkeys(KINDS, 0)

    def let_through(*arguments: Any, **named: Any) -> Scanned:
        return replace(check_section(*arguments, **named), problems=())

    monkeypatch.setattr(gate, "check_section", let_through)  # the count sees what the gate lets through
    (tmp_path / "let_through").mkdir()
    counts = run_sessions(own, tmp_path / "let_through", 5, monkeypatch)
    assert counts["ungrounded_numbers"] > 0
    assert counts["unverifiable_citations"] > 0
