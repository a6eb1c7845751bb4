"""Attack the paper tools: corpus, proposals, planted defects and scripted sessions; counts for research_attacks.json.

python scripts/research_attacks.py --sessions 1000 --out docs/benchmarks/research_attacks.json

A session is a random script of good and hostile tool calls. `--latex N` compiles the papers of the first N sessions.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "unit" / "paper")]

import test_paper_corpus as corpus  # noqa: E402
import test_paper_review as planted  # noqa: E402
from finished_run import write_run  # noqa: E402
from stub_model import NLL, called, said  # noqa: E402

from caramba.config.paper import PaperConfig  # noqa: E402
from caramba.console import logger  # noqa: E402
from caramba.errors import CarambaError  # noqa: E402
from caramba.paper import PaperDrafter, client, drafter, gate  # noqa: E402
from caramba.paper.check import check_section  # noqa: E402
from caramba.paper.compile import Compiled, compile_paper  # noqa: E402
from caramba.paper.document import read_sections  # noqa: E402
from caramba.paper.evidence import Evidence, read_evidence  # noqa: E402
from caramba.paper.folder import PAPER, PaperFolder  # noqa: E402
from caramba.paper.review import check_paper  # noqa: E402
from caramba.runs.files import write_json  # noqa: E402

SEED = 37
LIMIT = 60_000  # tokens of a session


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Count what attacks and fuzzed sessions get past the checks."
    )
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--latex", type=int, default=0, help="sessions whose papers are compiled by pdflatex")
    parser.add_argument("--out", type=Path, help="JSON file; default: print only")
    words = parser.parse_args()
    logger.quiet = True
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        write_run(run)
        record = {"script": "scripts/research_attacks.py", **of_corpus(run), **of_defects(run)}
        record["sessions"] = run_sessions(run, Path(name), words.sessions, words.latex)
    print(json.dumps(record, indent=1))
    if words.out is not None:
        write_json(words.out, record)


def of_corpus(run: Path) -> dict[str, Any]:
    """Count attacks that are refused and honest drafts that are."""
    evidence = read_evidence(run, run)
    blocked = [bool(corpus.problems(attack["body"], evidence)) for attack in corpus.ATTACKS]
    refused = [bool(corpus.problems(body, evidence)) for body in corpus.CORPUS["honest"]]
    return {
        "attacks": len(blocked),
        "attacks_blocked": sum(blocked),
        "honest_drafts": len(refused),
        "honest_drafts_refused": sum(refused),
    }


def of_defects(run: Path) -> dict[str, Any]:
    """Count planted defects that the checks by rule find, and findings in clean papers."""
    facts = planted.with_single_runs(read_evidence(run, run))
    cases = list(planted.planted())
    found = [check in {item.check for item in check_paper({"results": body}, facts)} for check, body in cases]
    clean = [bool(check_paper({"results": body}, facts)) for body in planted.clean()]
    return {
        "planted_defects": len(cases), "planted_defects_found": sum(found),
        "clean_papers": len(clean), "false_alarms": sum(clean),
    }  # fmt: skip


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
        good = chance.choice(
            ("A cache is studied.", rf"It has \result{{{NLL}}}.", r"\artifacttable{comparison} lists all.")
        )
        bodies = {
            key: chance.choice((good, good, attack, f"{good} {attack}")) for key in ("abstract", "results")
        }
        match name:
            case "write_tex_file":
                return name, {"sections": [{"section": key, "body": body} for key, body in bodies.items()]}
            case "update_section":
                return name, {"section": "results", "body": bodies["results"], "base_hash": ""}
            case "add_citation":
                return name, {"source_id": chance.choice(("arxiv:1", "../../etc/passwd", "bib:x"))}
            case _:
                return name, {"path": chance.choice(("paper.tex", "/etc/passwd", "../manifest.json"))}


def run_sessions(run: Path, folder: Path, count: int, with_latex: int) -> dict[str, Any]:
    """Return how many sessions adopted a version, and how many left what no session may leave."""
    evidence = read_evidence(run, run)
    config = PaperConfig.model_validate({
        "model": "stub", "sections": ["abstract", "results"], "citations": {"enabled": False},
        "api": {"base_url": "http://127.0.0.1:9/v1", "retries": 0},
        "budget": {"max_iterations": 12, "max_tokens": LIMIT, "max_reply_tokens": 200},
    })  # fmt: skip
    drafter.need_latex = lambda where: None
    faults: Counter[str] = Counter()
    adopted = 0
    for number in range(count):
        has_latex = number < with_latex
        gate.compile_paper = compile_paper if has_latex else _compiled
        if not has_latex:
            gate.unknown_digits = lambda *arguments: []
        model, output = Hostile(SEED + number), folder / f"session{number}"
        client.open_transport = model.open
        try:
            PaperDrafter(config, output, sleep=lambda seconds: None).draft_sync(run)
            adopted += 1
        except CarambaError:
            pass
        faults.update(find_faults(output, evidence, has_latex=has_latex))
        faults["spend_over_cap"] += model.tokens > LIMIT
    kinds = ("unverifiable_citations", "ungrounded_numbers", "broken_heads", "spend_over_cap")
    return {
        "count": count,
        "with_latex": with_latex,
        "adopted": adopted,
        **{kind: faults[kind] for kind in kinds},
    }


def find_faults(output: Path, evidence: Evidence, *, has_latex: bool) -> Counter[str]:
    """Check the head of a session's folder by itself."""
    found: Counter[str] = Counter()
    file = output / PAPER
    head = PaperFolder(output).head() if output.is_dir() else None
    if head is None:
        found["broken_heads"] += file.exists()
        return found
    names = [name for name in head["files"] if not name.endswith(".pdf")]
    if has_latex and compile_paper({name: (output / name).read_bytes() for name in names}).pdf is None:
        found["broken_heads"] += 1
    for name, body in read_sections(file.read_text(encoding="utf-8"), str(file)).items():
        for problem in check_section(name, body, evidence, {}).problems:
            found["unverifiable_citations" if "citation" in problem.text else "ungrounded_numbers"] += 1
    return found


def _compiled(files: Mapping[str, bytes]) -> Compiled:
    return Compiled(b"%PDF of " + files["paper.tex"], None)


if __name__ == "__main__":
    main()
