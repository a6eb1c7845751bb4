"""PaperDrafter: the loop between a language model, its tools and the gate, from artifacts to an adopted version.

A draft begins with the folder's versions, an open conversation, and what a person did to paper.tex, which is taken over
as written, or refused to the person before anything is paid for.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caramba.config.paper import PaperConfig
from caramba.console import logger
from caramba.errors import AgentError, BudgetExceeded, ConfigError
from caramba.paper.budget import BudgetLedger, Spent
from caramba.paper.client import LanguageModel, ModelUnusable, read_limits
from caramba.paper.compile import Compiled, need_latex
from caramba.paper.document import differs_in_bodies_alone, read_paper
from caramba.paper.evidence import Evidence, read_evidence
from caramba.paper.folder import HUMAN, PAPER, PDF, PaperFolder, Section, load_draft
from caramba.paper.gate import Gate, unknown_digits
from caramba.paper.literature import Literature, read_bibliography
from caramba.paper.tools import Toolbox, call_tool, first_messages, tool_schemas
from caramba.runs import lock
from caramba.runs.files import sha256_of

MOST_SILENT = 3  # replies in a row without a call, before anything is written


@dataclass(frozen=True)
class Drafted:
    """An adopted version: its number, its files, and what it took."""

    version: int
    paper: Path
    pdf: Path
    spent: Spent


class PaperDrafter:
    """Drafts a paper from the artifacts of a finished run into `output_dir`, by default `RUN/paper/`."""

    def __init__(
        self,
        config: PaperConfig | None = None,
        output_dir: str | Path | None = None,
        *,
        sleep: Callable[[float], None] = time.sleep,
        model: Callable[..., LanguageModel] = LanguageModel,
        extend: Callable[[Evidence], Evidence] = lambda evidence: evidence,
    ) -> None:
        """Draft by a configuration; `extend` adds to the evidence of the run what a research loop found."""
        self.config, self.sleep, self._model, self._extend = config or PaperConfig(), sleep, model, extend
        self.output_dir = None if output_dir is None else Path(output_dir).expanduser()

    async def draft(self, run_dir: str | Path, *, update: bool = False, group: str | None = None) -> Drafted:
        """Like `draft_sync`, in a thread. A cancelled draft continues to its end: cancel by its budget."""
        return await asyncio.to_thread(self.draft_sync, run_dir, update=update, group=group)

    def draft_sync(self, run_dir: str | Path, *, update: bool = False, group: str | None = None) -> Drafted:
        """Draft a paper on a run and return its adopted version.

        Without `update` the folder may hold no paper yet; with it the draft resumes from the last version, from what a
        person edited since, and from where an interrupted draft stopped.

        Raises:
            ConfigError: what is asked for cannot be begun: no artifacts, no LaTeX, no litellm, no key, a paper there.
            BudgetExceeded: a limit was reached; the draft is kept, and no version was changed.
            AgentError: the language model could not be asked, or answered what cannot be used; as above.
        """
        need_latex("paper")
        run = Path(run_dir)
        folder = run if group is None else run / "groups" / group
        evidence = self._extend(read_evidence(folder, run, group))
        paper = PaperFolder(self.output_dir or folder / "paper")
        # What it refuses is refused before anything is written.
        model = self._model(self.config, sleep=self.sleep)
        price = model.price()
        paper.root.mkdir(parents=True, exist_ok=True)
        with lock(paper.root, "draft"):
            session = _Session(self, evidence, paper, model)
            session.open(update=update)
            if self._model is LanguageModel:  # a loop asks once, and its replay asks nobody
                read_limits(self.config)
            try:
                return session.run(BudgetLedger(self.config.budget, session.draft.spent, price))
            except (AgentError, BudgetExceeded) as error:
                if self._model is not LanguageModel:  # a loop resumes itself
                    raise
                words = ["caramba", "paper", str(run), *(["--group", group] if group else [])]
                words += [*(["--output-dir", str(self.output_dir)] if self.output_dir else []), "--update"]
                raise type(error)(f"{error}; the draft is kept, resume with `{shlex.join(words)}`") from None


class _Session:
    """One draft in progress, its folder locked."""

    def __init__(self, drafter: PaperDrafter, evidence: Evidence, folder: PaperFolder, model: LanguageModel) -> None:
        self.config, self.evidence, self.folder, self.model = drafter.config, evidence, folder, model
        self.draft, self.gate = load_draft(folder), Gate(self.config, evidence)
        literature = Literature(self.config.citations, sleep=drafter.sleep)
        self.tools = Toolbox(self.gate, self.draft, literature, self._ask)

    def open(self, *, update: bool) -> None:
        """Bring the draft to where it resumes; refuse a paper that is on another run or not to be updated."""
        draft, config, evidence, root = self.draft, self.config, self.evidence, self.folder.root
        head = self.folder.head() or {}
        if not update and (head or draft.messages):
            there = f"version {head['version']}" if head else "an unfinished draft"
            raise ConfigError(f"{root}: holds {there} of a paper; --update resumes it, --output-dir DIR begins another")
        if draft.run_id not in ("", evidence.run_id):
            raise ConfigError(
                f"{root}: holds a paper on run {draft.run_id}, and this is run {evidence.run_id}; name another folder "
                "with --output-dir, or update it with its own run"
            )
        self.folder.heal()
        if config.citations.bibliography is not None:
            draft.records |= read_bibliography(Path(config.citations.bibliography).expanduser())
        taken = self._take_edits()
        if left_out := [name for name in draft.sections if name not in config.sections]:
            raise ConfigError(
                f"paper.sections leaves out {', '.join(left_out)}, which the paper has; add it, or remove it from "
                f"{root / PAPER}"
            )
        # A new edit is a new draft, with a budget of its own. With another title or report it is another conversation.
        goes_on = bool(draft.messages) and taken is None
        opening = json.dumps([first_messages(config, evidence, ""), evidence.report_sha256])
        opening_sha256 = hashlib.sha256(opening.encode()).hexdigest()
        if not goes_on or draft.opening_sha256 != opening_sha256:
            draft.messages = first_messages(config, evidence, self._state())
            draft.spent = draft.spent if goes_on else Spent()
        draft.run_id, draft.opening_sha256 = evidence.run_id, opening_sha256

    def _state(self) -> str:
        """Say what is written, and what the checks now find in it."""
        if not self.draft.sections:
            return "Nothing is written yet. Begin with get_paper_template, get_experiment_results and list_artifacts."
        error = self.gate.try_out(self.draft.sections, self.draft.citable()).error
        wrong = f" It no longer holds: {error}" if error else ""
        return f"The paper is written; read it with read_tex_file and update what the run has changed.{wrong}"

    def _take_edits(self) -> str | None:
        """Take over the sections of paper.tex that a person changed since it was last seen, and return their names.

        Returns None where nothing was changed. Where what was changed cannot be kept, the draft is as it was.
        """
        draft, head, file = self.draft, self.folder.head(), self.folder.root / PAPER
        if head is None or not file.is_file():
            return None
        # What was taken over into an adopted version is no edit any more, also where a kill kept that from being noted.
        has_taken = draft.taken_sha256 not in ("", head["taken_sha256"])
        if (digest := sha256_of(file)) == (draft.taken_sha256 if has_taken else head["files"][PAPER]):
            return None
        version = self.folder.version_path(head["version"]) / PAPER
        theirs, ours = read_paper(file), read_paper(version)
        if not differs_in_bodies_alone(file, version):
            raise ConfigError(
                f"{file}: text outside of the sections, their order or a heading was changed, and code writes that; "
                f"move it into a section, or take it back as in versions/{head['version']:03d}/{PAPER} (title, "
                "authors and sections are options of `caramba paper`)"
            )
        of_person = {name for name, section in draft.sections.items() if section.by == HUMAN}
        changed = {name: Section(body, HUMAN) for name, body in theirs.items()
                   if body != ours[name] or name in of_person}  # fmt: skip
        if wrong := self.gate.try_out(changed, draft.citable()).error:
            raise ConfigError(
                f"{file}: what was edited cannot be kept as it is; change it and resume with --update. {wrong}"
            )
        kept = {name: item for name, item in draft.sections.items() if name in theirs or name not in ours}
        draft.sections, draft.taken_sha256 = {**kept, **changed}, digest
        names = ", ".join([*changed, *(name for name in ours if name not in theirs)])
        logger.info(f"paper: keeps what was edited by hand in {names or 'no section'}")
        return names

    def run(self, ledger: BudgetLedger) -> Drafted:
        """Continue until a version is adopted."""
        self.ledger = ledger
        self._save()
        logger.info(f"paper: {self.model.name} writes in {self.folder.root}")
        while True:
            messages = self.draft.messages
            index = max((at for at, item in enumerate(messages) if item["role"] == "assistant"), default=-1)
            # Some calls of the last reply may have a result already, after a kill between two.
            answered = {message.get("tool_call_id") for message in messages[index + 1 :]}
            calls = [] if index < 0 else messages[index].get("tool_calls", [])
            if pending := [call for call in calls if call["id"] not in answered]:
                for call in pending:
                    name, text = call["function"]["name"], call["function"]["arguments"]
                    result = call_tool(name, text, self.tools.tools)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                    self._save()
            elif messages[-1]["role"] == "assistant":
                adopted = self._finish()
                if adopted is not None:
                    return adopted
            else:
                logger.info(f"paper: {ledger.spent.iterations} requests sent, at most {ledger.limits.max_iterations}")
                reply = self.model.ask(messages, tool_schemas(self.tools.tools), ledger, self._save)
                messages.append(reply.message)
                self._save()

    def _ask(self, messages: list[dict[str, Any]]) -> str:
        """Send a conversation without tools and return the answer."""
        return self.model.ask(messages, [], self.ledger, self._save).message["content"]

    def _finish(self) -> Drafted | None:
        """Adopt the draft as a version, or tell the model what is missing."""
        draft, gate = self.draft, self.gate
        missing = self.tools.missing()
        unwritten = Compiled(None, f"not finished: {', '.join(missing)} not written")
        passed = unwritten if missing else gate.try_out(draft.sections, draft.citable())
        refusal = passed.error
        if passed.undefined:
            refusal = f"not finished: these lead nowhere: {', '.join(passed.undefined)}"
        theirs = [section.body for section in draft.sections.values() if section.by != HUMAN]
        refusal = refusal or unknown_digits(theirs, self.evidence, draft.citable())
        # What a person saved in paper.tex while the draft ran.
        if refusal is None and (taken := self._take_edits()) is not None:
            refusal = (
                f"A person edited the paper meanwhile ({taken or 'nothing that you see'}); read it with "
                "read_tex_file, keep their words, and change only what no longer fits them."
            )
        if refusal is not None:
            draft.messages.append({"role": "user", "content": refusal})
            self._save()
            silent = [message["role"] for message in draft.messages[-2 * MOST_SILENT :]]
            if not draft.sections and silent == ["assistant", "user"] * MOST_SILENT:
                raise ModelUnusable(
                    f"{self.config.model}: {MOST_SILENT} replies without a call and nothing written; take another"
                )
            return None
        facts = {name: getattr(self.evidence, name) for name in ("report_sha256", "manifest_sha256", "proxy")}
        facts |= {"model": self.config.model, **asdict(draft)}
        number = self.folder.adopt(passed.files, facts, self.config.versions_kept)
        draft.messages, draft.taken_sha256 = [], ""
        self._save()
        return Drafted(number, self.folder.root / PAPER, self.folder.root / PDF, draft.spent)

    def _save(self) -> None:
        """Save the draft with what is reserved: a kill in mid-request cannot give it back."""
        self.draft.save(self.folder.draft_file)
