"""What a person did to paper.tex: taken over as written, or refused to the person before anything is paid for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from caramba.errors import ConfigError
from caramba.paper.check import CITING, check_section, report
from caramba.paper.document import outside_of_sections, read_sections
from caramba.paper.draft import HUMAN, Draft, Section
from caramba.paper.folder import PAPER, PaperFolder
from caramba.paper.gate import Gate
from caramba.runs.files import sha256_of


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
    original = (folder.version_path(head["version"]) / PAPER).read_text(encoding="utf-8")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 ({error}); save it as UTF-8") from None
    theirs, ours = read_sections(text, str(file)), read_sections(original, PAPER)
    common = theirs.keys() & ours.keys()
    wrong = outside_of_sections(text, common) != outside_of_sections(original, common)
    refuse_left_out(sorted(theirs), gate.config.sections, file)
    if wrong:
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
    cited = _with_own_entries(draft, changed, gate)
    _check(file, changed, sections, dataclasses.replace(draft, cited=cited), gate)
    draft.sections, draft.cited = sections, cited
    draft.taken_from, draft.taken_sha256, draft.taken = head["version"], digest, theirs
    return (*changed, *removed)


def refuse_left_out(there: Iterable[str], asked: Sequence[str], file: object) -> None:
    """Refuse sections that a paper has and its options leave out."""
    left_out = [name for name in there if name not in asked]
    if left_out:
        raise ConfigError(
            f"paper.sections leaves out {', '.join(left_out)}, which the paper has; add it, or remove it from {file}"
        )


def _with_own_entries(draft: Draft, changed: Mapping[str, Section], gate: Gate) -> dict[str, str]:
    """Let a person cite an entry of the bibliography by its own key."""
    cited = dict(draft.cited)
    for name, section in changed.items():
        try:
            uses = check_section(name, section.body, gate.evidence, {}, numbers_are_free=True).scanned.uses
        except RecursionError:
            continue  # refused below
        for use in uses:
            for key in use.arguments[0].split(",") if use.command in CITING else ():
                identity = f"bib:{key.strip()}"
                if identity in draft.records and identity not in cited.values():
                    cited.setdefault(key.strip(), identity)
    return cited


def _check(
    file: object, changed: Mapping[str, Section], sections: dict[str, Section], draft: Draft, gate: Gate
) -> None:
    """Refuse, to the person, what the gate would refuse to a model that did not write it."""
    try:
        found = gate.problems(changed, draft.citable())
        wrong = report(found)
        if changed and not gate.problems(sections, draft.citable()):
            ordered = {name: sections[name] for name in gate.config.sections if name in sections}
            wrong = gate.try_out(ordered, draft.citable()).refusal
    except RecursionError:
        wrong = "braces or environments are nested too deeply to be read"
    if wrong:
        raise ConfigError(
            f"{file}: what was edited cannot be kept as it is; change it and resume with --update. {wrong}"
        )
