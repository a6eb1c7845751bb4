"""How a draft begins: the folder's versions, an open conversation, and what a person did to paper.tex, which is taken
over as written, or refused to the person before anything is paid for."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from caramba.config.paper import PaperConfig
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.paper.budget import Spent
from caramba.paper.check import check_section, report
from caramba.paper.document import outside_of_sections, read_paper
from caramba.paper.draft import HUMAN, Draft, Section, read_record
from caramba.paper.evidence import Evidence
from caramba.paper.folder import PAPER, PaperFolder
from caramba.paper.gate import Gate
from caramba.paper.records import read_bibliography
from caramba.paper.template import first_messages
from caramba.runs.files import sha256_of


def open_draft(
    draft: Draft, folder: PaperFolder, config: PaperConfig, evidence: Evidence, group: str, *, update: bool
) -> None:
    """Bring a draft to where it resumes.

    Raises:
        ConfigError: there is a paper and `update` is false, it is on another run, or an edit cannot be kept.
    """
    head, gate = folder.head(), Gate(config, evidence)
    has_replies = any(message["role"] == "assistant" for message in draft.messages)
    # A draft that was stopped before it had a reply is nothing yet: it begins again.
    if not update and (head or draft.sections or has_replies or draft.spent.tokens):
        there = f"version {head['version']}" if head is not None else "an unfinished draft"
        raise ConfigError(
            f"{folder.root}: holds {there} of a paper; --update resumes it, --output-dir DIR begins another"
        )
    known = (
        (draft.run_id, draft.group)
        if draft.run_id
        else ((head or {}).get("run_id"), (head or {}).get("group"))
    )
    if known[0] and known != (evidence.run_id, group):
        shown = [
            f"run {run}" + (f" (group {of})" if of else "") for run, of in (known, (evidence.run_id, group))
        ]
        raise ConfigError(
            f"{folder.root}: holds a paper on {shown[0]}, and this is {shown[1]}; name another folder with "
            "--output-dir, or update it with its own run"
        )
    folder.heal()
    if head is not None and not draft.sections:
        bodies = read_paper(folder.version_path(head["version"]) / PAPER)
        draft.sections = {name: Section(body, head["sections"][name]["by"]) for name, body in bodies.items()}
        draft.cited = dict(head["citations"])
        draft.records |= {identity: read_record(plain) for identity, plain in head["records"].items()}
    if config.citations.bibliography is not None:
        draft.records |= read_bibliography(Path(config.citations.bibliography).expanduser())
    if taken := take_edits(folder, draft, gate):
        logger.info(f"paper: keeps what was edited by hand in {', '.join(taken)}")
    _refuse_left_out(draft.sections, config.sections, folder.root / PAPER)
    # A new edit is a new draft, with a budget of its own.
    is_open = draft.is_open and update and taken is None
    # With another title or instruction it is another conversation.
    opening = hashlib.sha256(json.dumps(first_messages(config, evidence, "")).encode()).hexdigest()
    if not is_open or draft.report_sha256 != evidence.report_sha256 or draft.opening_sha256 != opening:
        draft.messages = first_messages(config, evidence, _state(draft, gate))
        draft.spent = draft.spent if is_open else Spent()
    draft.is_open, draft.run_id, draft.group = True, evidence.run_id, group
    draft.report_sha256, draft.opening_sha256 = evidence.report_sha256, opening


def _state(draft: Draft, gate: Gate) -> str:
    """Say what is written, and what the checks now find in it."""
    if not draft.sections:
        return "Nothing is written yet. Begin with get_paper_template, get_experiment_results and list_artifacts."
    found = gate.problems(draft.sections, draft.citable())
    wrong = f" These no longer hold:\n{report(found)}" if found else ""
    return f"The paper is written; read it with read_tex_file and update what the run has changed.{wrong}"


def take_edits(folder: PaperFolder, draft: Draft, gate: Gate) -> tuple[str, ...] | None:
    """Take over the sections of paper.tex that a person changed since it was last looked at, and return their names.

    Returns None where nothing was changed since.

    Raises:
        ConfigError: what was changed cannot be kept, or the gate refuses it. The draft is as it was then.
    """
    head, file = folder.head(), folder.root / PAPER
    if head is None or not file.is_file():
        return None
    digest = sha256_of(file)
    # What was taken over into an adopted version is no edit any more, also where a kill kept that from being noted.
    has_taken = draft.taken_from == head["version"] and draft.taken_sha256 != ""
    if digest == (draft.taken_sha256 if has_taken else head["files"][PAPER]):
        return None
    version = folder.version_path(head["version"]) / PAPER
    theirs, ours = read_paper(file), read_paper(version)
    _refuse_left_out(sorted(theirs), gate.config.sections, file)
    common = theirs.keys() & ours.keys()
    if outside_of_sections(file.read_text(encoding="utf-8"), common) != outside_of_sections(
        version.read_text(encoding="utf-8"), common
    ):
        raise ConfigError(
            f"{file}: text outside of the sections, their order or a heading was changed, and code writes that; move "
            f"it into a section, or take it back as in versions/{head['version']:03d}/{PAPER} (title, authors and "
            "sections are options of `caramba paper`)"
        )
    # What was seen before is no new edit: an update of the model's since then is kept.
    before = draft.taken if has_taken else ours
    changed = {name: Section(body, HUMAN) for name, body in theirs.items() if body != before.get(name)}
    removed = [name for name in before if name not in theirs]
    sections = {name: item for name, item in {**draft.sections, **changed}.items() if name not in removed}
    cited = dict(draft.cited)
    for name, section in changed.items():  # a person cites an entry of the bibliography by its own key
        for key in check_section(
            name, section.body, gate.evidence, {}, numbers_are_free=True
        ).scanned.citation_keys():
            if f"bib:{key}" in draft.records and f"bib:{key}" not in cited.values():
                cited.setdefault(key, f"bib:{key}")
    citable = dataclasses.replace(draft, cited=cited).citable()
    wrong = report(gate.problems(changed, citable))
    if changed and not gate.problems(sections, citable):
        ordered = {name: sections[name] for name in gate.config.sections if name in sections}
        wrong = gate.try_out(ordered, citable).refusal
    if wrong:
        raise ConfigError(
            f"{file}: what was edited cannot be kept as it is; change it and resume with --update. {wrong}"
        )
    draft.sections, draft.cited = sections, cited
    draft.taken_from, draft.taken_sha256, draft.taken = head["version"], digest, theirs
    return (*changed, *removed)


def _refuse_left_out(there: Iterable[str], asked: Sequence[str], file: object) -> None:
    """Refuse sections that a paper has and its options leave out."""
    left_out = [name for name in there if name not in asked]
    if left_out:
        raise ConfigError(
            f"paper.sections leaves out {', '.join(left_out)}, which the paper has; add it, or remove it from {file}"
        )
