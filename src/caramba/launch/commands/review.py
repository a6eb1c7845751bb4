"""`caramba review RUN`: the checks of a run's paper, and a model's review, written as the next review_iterN.json."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from caramba.config.paper import ReviewConfig
from caramba.config.parse import parse_as
from caramba.errors import ConfigError
from caramba.launch.commands.arguments import CommandArguments
from caramba.paper.client import read_limits
from caramba.paper.document import read_paper
from caramba.paper.evidence import read_evidence
from caramba.paper.folder import PAPER, VERSIONS, PaperFolder
from caramba.paper.review import check_paper
from caramba.paper.reviewer import PaperReviewer, Review, titles_in
from caramba.runs import read_manifest, resolve_run
from caramba.runs.files import sha256_of, write_json

_KEYS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("model", ("model",)),
    ("strictness", ("strictness",)),
    ("persona", ("reviewer_persona",)),
    ("base_url", ("api", "base_url")),
    ("api_key_env", ("api", "key_env")),
    ("tools", ("api", "tools")),
)


def main(argv: list[str]) -> int:
    """Review the paper of a run; print the findings and return 0.

    A model reviews where the manifest has a `review` section or --model names one; else the checks by rule alone.

    Raises:
        ConfigError: no such run, no paper in it, one whose sections are not marked, or a model that cannot be asked.
    """
    parser = CommandArguments("review")
    parser.add_argument("run")
    parser.add_argument("--group")
    parser.add_argument("--paper-dir")
    for key, _ in _KEYS:
        parser.add_argument(f"--{key.replace('_', '-')}")
    args = parser.parse_args(argv)
    run = resolve_run(args.run)
    folder = run if args.group is None else run / "groups" / args.group
    paper = Path(args.paper_dir).expanduser() if args.paper_dir else folder / "paper"
    file = paper / PAPER
    if not file.is_file():
        raise ConfigError(f"{file}: no paper to review; draft one with `caramba paper {args.run}`")
    evidence, manifest = read_evidence(folder, run, args.group), read_manifest(run)
    sections = read_paper(file)
    config = _config(manifest.review, args)
    if config is None:
        review = Review(tuple(check_paper(sections, evidence)))
    else:
        reviewer = PaperReviewer(config)
        read_limits(config.as_paper())
        head = (PaperFolder(paper).head() if (paper / VERSIONS).is_dir() else None) or {}
        review = reviewer.review(sections, evidence, titles_in(head, sections), manifest)
    names = (paper / f"review_iter{number}.json" for number in itertools.count(1))
    target = next(path for path in names if not path.exists())
    facts = {
        "run_id": evidence.run_id,
        "paper_sha256": sha256_of(file),
        "report_sha256": evidence.report_sha256,
    }
    write_json(target, {**review.as_dict(config), **facts})
    for finding in review.findings:
        kind = "blocking" if finding.is_blocking else "minor"
        print(f"{finding.id} {kind:<8} {finding.check} ({finding.section}): {finding.text}")
    if config is not None:
        print(f"score {review.score:g} of 10, {review.action}: {review.summary}")
    print(f"{len(review.findings)} findings, {len(review.blocking)} blocking\nreview: {target}")
    return 0


def _config(section: ReviewConfig | None, args: Any) -> ReviewConfig | None:
    """Return how a model reviews, None where none does."""
    if section is not None and not section.enabled:
        section = None
    if section is None and args.model is None:
        return None
    plain: dict[str, Any] = (section or ReviewConfig()).model_dump(mode="json")
    for key, path in _KEYS:
        if getattr(args, key) is not None:
            target = plain if len(path) == 1 else plain[path[0]]
            target[path[-1]] = getattr(args, key)
    return parse_as(ReviewConfig, plain)
