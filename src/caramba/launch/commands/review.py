"""`caramba review RUN`: the deterministic checks of a run's paper, written as the next review_iterN.json."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path

from caramba.errors import ConfigError
from caramba.launch.commands.arguments import CommandArguments
from caramba.paper.document import read_sections
from caramba.paper.evidence import read_evidence
from caramba.paper.folder import PAPER
from caramba.paper.review import check_paper
from caramba.runs import resolve_run
from caramba.runs.files import sha256_of, write_json


def main(argv: list[str]) -> int:
    """Check the paper of a run; print the findings and return 0.

    Raises:
        ConfigError: no such run, no paper in it, or one whose sections are not marked.
    """
    parser = CommandArguments("review")
    parser.add_argument("run")
    parser.add_argument("--group")
    parser.add_argument("--paper-dir")
    args = parser.parse_args(argv)
    run = resolve_run(args.run)
    folder = run if args.group is None else run / "groups" / args.group
    paper = Path(args.paper_dir).expanduser() if args.paper_dir else folder / "paper"
    file = paper / PAPER
    if not file.is_file():
        raise ConfigError(f"{file}: no paper to review; draft one with `caramba paper {args.run}`")
    evidence = read_evidence(folder, run, args.group)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 ({error}); save it as UTF-8") from None
    findings = check_paper(read_sections(text, str(file)), evidence)
    names = (paper / f"review_iter{number}.json" for number in itertools.count(1))
    target = next(path for path in names if not path.exists())
    is_blocked = any(finding.is_blocking for finding in findings)
    write_json(
        target,
        {
            "schema": 1,
            "run_id": evidence.run_id,
            "paper_sha256": sha256_of(file),
            "report_sha256": evidence.report_sha256,
            "checks": "deterministic",
            "is_blocked": is_blocked,
            "findings": [{"id": finding.id, **asdict(finding)} for finding in findings],
        },
    )
    for finding in findings:
        kind = "blocking" if finding.is_blocking else "minor"
        print(f"{finding.id} {kind:<8} {finding.check} ({finding.section}): {finding.text}")
    print(
        f"{len(findings)} findings, {sum(item.is_blocking for item in findings)} blocking\nreview: {target}"
    )
    return 0
