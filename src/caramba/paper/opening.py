"""How a draft begins: the folder's versions, a person's edits, an open conversation, or nothing yet."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from caramba.config.paper import PaperConfig
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.paper.budget import Spent
from caramba.paper.check import report
from caramba.paper.document import read_sections
from caramba.paper.draft import Draft, Section, read_record
from caramba.paper.edits import refuse_left_out, take_edits
from caramba.paper.evidence import Evidence
from caramba.paper.folder import PAPER, PaperFolder
from caramba.paper.gate import Gate
from caramba.paper.records import read_bibliography
from caramba.paper.template import first_messages


def open_draft(
    draft: Draft, folder: PaperFolder, config: PaperConfig, evidence: Evidence, group: str, *, update: bool
) -> None:
    """Bring a draft to where it resumes.

    Raises:
        ConfigError: there is a paper and `update` is false, it is on another run, or an edit cannot be kept.
    """
    head, gate = folder.head(), Gate(config, evidence)
    if not update:
        _refuse_what_is_there(draft, folder, head)
    _refuse_another_run(draft, folder, head, evidence.run_id, group)
    folder.heal()
    if head is not None and not draft.sections:
        draft.sections = _of_version(folder, head)
        draft.cited = dict(head["citations"])
        draft.records |= {identity: read_record(plain) for identity, plain in head["records"].items()}
    if config.citations.bibliography is not None:
        draft.records |= read_bibliography(Path(config.citations.bibliography).expanduser())
    if taken := take_edits(folder, draft, gate):
        logger.info(f"paper: keeps what was edited by hand in {', '.join(taken)}")
    refuse_left_out(draft.sections, config.sections, folder.root / PAPER)
    # A new edit is a new draft, with a budget of its own.
    is_open = draft.is_open and update and taken is None
    opening = _opening(config, evidence)
    if not is_open or draft.report_sha256 != evidence.report_sha256 or draft.opening_sha256 != opening:
        draft.messages = first_messages(config, evidence, _state(draft, gate))
        if not is_open:
            draft.spent = Spent()
    draft.is_open, draft.run_id, draft.group = True, evidence.run_id, group
    draft.report_sha256, draft.opening_sha256 = evidence.report_sha256, opening


def _refuse_what_is_there(draft: Draft, folder: PaperFolder, head: dict[str, Any] | None) -> None:
    """A draft that was stopped before it had a reply is nothing yet: it begins again."""
    has_replies = any(message["role"] == "assistant" for message in draft.messages)
    if head is None and not draft.sections and not has_replies and not draft.spent.tokens:
        return
    there = f"version {head['version']}" if head is not None else "an unfinished draft"
    raise ConfigError(
        f"{folder.root}: holds {there} of a paper; --update resumes it, --output-dir DIR begins another"
    )


def _refuse_another_run(
    draft: Draft, folder: PaperFolder, head: dict[str, Any] | None, run_id: str, group: str
) -> None:
    """The sections of one run's paper are no beginning for another's: their claims would stand unseen."""
    known = draft.run_id or (head or {}).get("run_id", "")
    known_group = draft.group if draft.run_id else (head or {}).get("group", "")
    if known and (known, known_group) != (run_id, group):
        raise ConfigError(
            f"{folder.root}: holds a paper on run {known}{_of(known_group)}, and this is run {run_id}{_of(group)}; "
            "name another folder with --output-dir, or update it with its own run"
        )


def _of(group: str) -> str:
    return f" (group {group})" if group else ""


def _of_version(folder: PaperFolder, head: dict[str, Any]) -> dict[str, Section]:
    file = folder.version_path(head["version"]) / PAPER
    bodies = read_sections(file.read_text(encoding="utf-8"), str(file))
    return {name: Section(body, head["sections"][name]["by"]) for name, body in bodies.items()}


def _opening(config: PaperConfig, evidence: Evidence) -> str:
    """Return a hash of the model's first messages: with another title or instruction it is another conversation."""
    return hashlib.sha256(json.dumps(first_messages(config, evidence, "")).encode()).hexdigest()


def _state(draft: Draft, gate: Gate) -> str:
    """Say what is written, and what the checks now find in it."""
    if not draft.sections:
        return "Nothing is written yet. Begin with get_paper_template, get_experiment_results and list_artifacts."
    found = gate.problems(draft.sections, draft.citable())
    wrong = f" These no longer hold:\n{report(found)}" if found else ""
    return f"The paper is written; read it with read_tex_file and update what the run has changed.{wrong}"
