"""Attack the paper tools: corpus, proposals, planted defects and scripted sessions; counts for research_attacks.json.

python scripts/research_attacks.py --sessions 1000 --jobs 32 --out docs/benchmarks/research_attacks.json

A session is a random script of honest and hostile tool calls. What it leaves is read without the scanner of the gate:
digits outside of commands, and keys of citations that references.bib lacks. Only `--latex N` needs pdflatex: it
compiles the papers of the first N sessions and reads the digits of their pages. In pieces, with one --out and --folder:

python scripts/research_attacks.py --first 500 --sessions 500 --latex 500 --folder DIR --out FILE
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import pickle
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
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
from caramba.paper import PaperDrafter, client, drafter, gate, printed  # noqa: E402
from caramba.paper.check import check_section  # noqa: E402
from caramba.paper.compile import Compiled, compile_paper  # noqa: E402
from caramba.paper.document import read_paper  # noqa: E402
from caramba.paper.evidence import Evidence, read_evidence  # noqa: E402
from caramba.paper.folder import BIBLIOGRAPHY, PAPER, PaperFolder  # noqa: E402
from caramba.paper.printed import unknown_digits  # noqa: E402
from caramba.paper.review import check_paper  # noqa: E402
from caramba.runs.files import write_json, write_whole  # noqa: E402

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


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Count what attacks and fuzzed sessions get past the checks."
    )
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first session, whose seed follows from it"
    )
    parser.add_argument("--latex", type=int, default=0, help="sessions whose papers are compiled by pdflatex")
    parser.add_argument("--folder", type=Path, help="keeps what pdflatex made; default: a temporary one")
    parser.add_argument("--jobs", type=int, default=1, help="processes among which the sessions are spread")
    parser.add_argument("--out", type=Path, help="JSON file; default: print only")
    words = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = (words.folder or Path(name)).absolute()
        run = folder / "run"
        if not run.exists():
            write_run(run)
        record = {"script": "scripts/research_attacks.py", **of_corpus(run), **of_defects(run)}
        found = run_sessions(run, folder, words.sessions, words.latex, words.jobs, words.first)
        if words.first:
            earlier = json.loads(words.out.read_text(encoding="utf-8"))["sessions"]
            assert earlier["count"] == words.first, "the sessions before --first are not in --out"
            found = {key: earlier[key] + value for key, value in found.items()}
        record["sessions"] = found
    print(json.dumps(record, indent=1))
    print(f"{sum(os.times()[:4]):.0f} seconds of CPU, {time.perf_counter() - began:.0f} in all")
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
            (*HONEST, rf"It has \result{{{NLL}}}.", r"\artifacttable{comparison} lists all.")
        )
        bodies = {
            key: chance.choice((good, good, attack, f"{good} {attack}", rf"{good} \citep{{a2018x}}"))
            for key in ("abstract", "results")
        }
        match name:
            case "write_tex_file":
                return name, {"sections": [{"section": key, "body": body} for key, body in bodies.items()]}
            case "update_section":
                return name, {"section": "results", "body": bodies["results"], "base_hash": ""}
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


def run_sessions(
    run: Path, folder: Path, count: int, with_latex: int, jobs: int = 1, first: int = 0
) -> dict[str, Any]:
    """Return how many sessions adopted a version, and how many left what no session may leave."""
    (folder / "works.bib").write_text(WORKS, encoding="utf-8")
    session = functools.partial(run_session, run, folder, first + with_latex)
    numbers = range(first, first + count)
    if jobs == 1:
        found = [session(number) for number in numbers]
    else:
        with ProcessPoolExecutor(jobs) as pool:
            found = list(pool.map(session, numbers, chunksize=4))
    total: Counter[str] = Counter()
    for faults in found:
        total.update(faults)
    kinds = {kind: total[kind] for kind in KINDS}
    return {"count": count, "with_latex": with_latex, "adopted": total["adopted"], **kinds}


def run_session(run: Path, folder: Path, with_latex: int, number: int) -> Counter[str]:
    """Draft with a hostile writer, and count what is wrong with what it leaves."""
    logger.quiet = True
    has_latex = number < with_latex
    if not has_latex:
        drafter.need_latex = lambda where: None
        gate.compile_paper = _compiled
        gate.unknown_digits = lambda *arguments: []
    else:
        kept = folder / "compiled"
        kept.mkdir(exist_ok=True)
        gate.compile_paper = printed.compile_paper = functools.partial(compile_once, kept)
        gate.unknown_digits = unknown_digits
    config = PaperConfig.model_validate({
        "model": "stub", "sections": ["abstract", "results"],
        "citations": {"enabled": False, "bibliography": str(folder / "works.bib")},
        "api": {"base_url": "http://127.0.0.1:9/v1", "retries": 0},
        "budget": {"max_iterations": 12, "max_tokens": LIMIT, "max_reply_tokens": 200},
    })  # fmt: skip
    model, output = Hostile(SEED + number), folder / f"session{number}"
    client.open_transport = model.open
    found: Counter[str] = Counter()
    try:
        PaperDrafter(config, output, sleep=lambda seconds: None).draft_sync(run)
        found["adopted"] += 1
    except CarambaError:
        pass
    found.update(find_faults(output, _evidence(run), gate.compile_paper if has_latex else None))
    found["spend_over_cap"] += model.tokens > LIMIT
    shutil.rmtree(output, ignore_errors=True)
    return found


_evidence = functools.cache(lambda run: read_evidence(run, run))


def compile_once(kept: Path, files: Mapping[str, bytes], **options: Any) -> Compiled:
    """Compile each set of files once for all sessions: the same files give the same PDF."""
    file = kept / hashlib.sha256(repr((sorted(files.items()), options)).encode()).hexdigest()
    if not file.is_file():
        write_whole(file, pickle.dumps(compile_paper(files, **options)))
    return pickle.loads(file.read_bytes())


def find_faults(
    output: Path, evidence: Evidence, compiles: Callable[[Mapping[str, bytes]], Compiled] | None
) -> Counter[str]:
    """Check the head of a session's folder by itself."""
    found: Counter[str] = Counter()
    file = output / PAPER
    head = PaperFolder(output).head() if output.is_dir() else None
    if head is None:
        found["broken_heads"] += file.exists()
        return found
    names = [name for name in head["files"] if not name.endswith(".pdf")]
    if compiles is not None and compiles({name: (output / name).read_bytes() for name in names}).pdf is None:
        found["broken_heads"] += 1
    works = (output / BIBLIOGRAPHY).read_text(encoding="utf-8")
    for name, body in read_paper(file).items():
        keys = {key.strip() for keys in _CITING.findall(body) for key in keys.split(",")}
        found["unverifiable_citations"] += any(
            key not in corpus.CITED or f"{{{key}," not in works for key in keys
        )
        problems = check_section(name, body, evidence, corpus.CITED).problems
        found["ungrounded_numbers"] += bool(loose_digits(body) or problems)
    return found


def _compiled(files: Mapping[str, bytes]) -> Compiled:
    return Compiled(b"%PDF of " + files["paper.tex"], None)


if __name__ == "__main__":
    main()
