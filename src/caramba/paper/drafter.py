"""PaperDrafter: the loop between a language model, its tools and the gate, from artifacts to an adopted version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caramba.config.paper import PaperConfig
from caramba.console import logger
from caramba.errors import ConfigError
from caramba.paper.arguments import tool_schemas
from caramba.paper.budget import Ledger, Spent
from caramba.paper.check import report
from caramba.paper.client import LanguageModel, need_model
from caramba.paper.compile import need_latex
from caramba.paper.document import outside_of_sections, read_sections
from caramba.paper.draft import HUMAN, Section, load_draft, read_record
from caramba.paper.evidence import Evidence, read_evidence
from caramba.paper.folder import PAPER, PDF, PaperFolder
from caramba.paper.records import read_bibliography
from caramba.paper.search import Literature
from caramba.paper.template import first_messages
from caramba.paper.tools import Toolbox
from caramba.runs import lock


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
    ) -> None:
        self.config = config or PaperConfig()
        self.output_dir = None if output_dir is None else Path(output_dir).expanduser()
        self._sleep = sleep

    async def draft(self, run_dir: str | Path, *, update: bool = False, group: str | None = None) -> Drafted:
        """Like `draft_sync`, in a thread. A cancelled draft goes on to its end: cancel by its budget."""
        return await asyncio.to_thread(self.draft_sync, run_dir, update=update, group=group)

    def draft_sync(self, run_dir: str | Path, *, update: bool = False, group: str | None = None) -> Drafted:
        """Draft a paper on a run and return its adopted version.

        Without `update` the folder may hold no paper yet; with it the draft goes on from the last version, from what a
        person edited since, and from where an interrupted draft stopped.

        Raises:
            ConfigError: what is asked for cannot be begun: no artifacts, no LaTeX, no litellm, no key, a paper there.
            BudgetExceeded: a limit was reached; the draft is kept, and no version was changed.
            AgentError: the language model could not be asked, or answered what cannot be used; as above.
        """
        need_latex("paper")
        need_model(self.config, "paper")
        run = Path(run_dir)
        folder = run if group is None else run / "groups" / group
        evidence = read_evidence(folder, run, group)
        paper = PaperFolder(self.output_dir or folder / "paper")
        paper.root.mkdir(parents=True, exist_ok=True)
        with lock(paper.root, "draft"):
            return _Session(self.config, evidence, paper, self._sleep).run(update=update)


class _Session:
    """One draft at work, its folder held."""

    def __init__(
        self, config: PaperConfig, evidence: Evidence, folder: PaperFolder, sleep: Callable[[float], None]
    ) -> None:
        self.config, self.evidence, self.folder, self._sleep = config, evidence, folder, sleep
        self.draft = load_draft(folder.draft_file)

    def run(self, *, update: bool) -> Drafted:
        self._begin(update=update)
        server = f" at {self.config.api.base_url}" if self.config.api.base_url else ""
        logger.info(f"paper: {self.config.model}{server} writes in {self.folder.root}")
        model = LanguageModel(self.config, sleep=self._sleep)
        ledger = Ledger(self.config.budget, self.draft.spent, model.price())
        literature = Literature(self.config.citations, sleep=self._sleep)
        tools = Toolbox(self.config, self.evidence, self.draft, self.folder, literature)
        schemas = tool_schemas(tools.names())
        while True:
            last = self.draft.messages[-1]
            if pending := self._unanswered():
                for call in pending:
                    self._answer(tools, call)
            elif last["role"] == "assistant":
                adopted = self._finish(tools)
                if adopted is not None:
                    return adopted
            else:
                ledger.begin()
                logger.info(
                    f"paper: request {self.draft.spent.iterations} of at most {self.config.budget.max_iterations}"
                )
                self._note_request(schemas)
                reply = model.ask(self.draft.messages, schemas, ledger, self._note_attempt)
                self.draft.messages.append(reply.message())
                self.folder.note(
                    "reply", message=reply.message(), finish=reply.finish, prompt_tokens=reply.prompt_tokens,
                    reply_tokens=reply.reply_tokens, spent=self.draft.spent.plain(),
                )  # fmt: skip
                self._save()

    def _begin(self, *, update: bool) -> None:
        """Bring the draft to where it goes on: the folder's versions, a person's edits, an open conversation."""
        head, draft = self.folder.head(), self.draft
        if not update and (head is not None or draft.sections):
            there = f"version {head['version']}" if head is not None else "an unfinished draft"
            raise ConfigError(
                f"{self.folder.root}: holds {there} of a paper; --update goes on from it, --output-dir DIR begins "
                "another"
            )
        self.folder.heal()
        if head is not None and not draft.sections:
            draft.sections = self._of_version(head)
            draft.cited = dict(head["citations"])
            draft.records |= {identity: read_record(plain) for identity, plain in head["records"].items()}
        self._take_edits(head)
        foreign = [name for name in draft.sections if name not in self.config.sections]
        if foreign:
            raise ConfigError(
                f"paper.sections leaves out {', '.join(foreign)}, which the paper has; add it, or remove it from "
                f"{self.folder.root / PAPER}"
            )
        if self.config.citations.bibliography is not None:
            draft.records |= read_bibliography(Path(self.config.citations.bibliography).expanduser())
        is_same = draft.report_sha256 == self.evidence.report_sha256
        if not draft.is_open or not is_same:
            draft.messages = first_messages(self.config, self.evidence, self._state())
            if not draft.is_open:
                draft.spent = Spent()
        draft.is_open, draft.run_id = True, self.evidence.run_id
        draft.report_sha256 = self.evidence.report_sha256
        self.folder.note("begun", run=self.evidence.run_id, update=update, model=self.config.model)
        self._save()

    def _of_version(self, head: dict[str, Any]) -> dict[str, Section]:
        file = self.folder.version_path(head["version"]) / PAPER
        bodies = read_sections(file.read_text(encoding="utf-8"), str(file))
        return {name: Section(body, head["sections"][name]["by"]) for name, body in bodies.items()}

    def _take_edits(self, head: dict[str, Any] | None) -> None:
        """Take over the sections of paper.tex that a person changed; they are kept as written."""
        text = self.folder.edited()
        if text is None or head is None:
            return
        file = self.folder.root / PAPER
        original = (self.folder.version_path(head["version"]) / PAPER).read_text(encoding="utf-8")
        theirs, ours = read_sections(text, str(file)), read_sections(original, PAPER)
        if sorted(theirs) == sorted(ours) and outside_of_sections(text) != outside_of_sections(original):
            raise ConfigError(
                f"{file}: text outside of the sections was changed, and code writes that; move it into a section, or "
                f"take it back as in versions/{head['version']:03d}/{PAPER}"
            )
        for name, body in theirs.items():
            if body != ours.get(name):
                self.draft.sections[name] = Section(body, HUMAN)
        for name in set(ours) - set(theirs):
            self.draft.sections.pop(name, None)
        self.draft.is_open = False  # the conversation so far is about another text

    def _state(self) -> str:
        """Say what is written, and what the checks now find in it."""
        if not self.draft.sections:
            return "Nothing is written yet. Begin with get_paper_template, get_experiment_results and list_artifacts."
        tools = Toolbox(
            self.config, self.evidence, self.draft, self.folder, Literature(self.config.citations)
        )
        found = tools.gate.problems(self.draft.sections, self.draft.citable())
        wrong = f" These no longer hold:\n{report(found)}" if found else ""
        return f"The paper is written; read it with read_tex_file and update what the run has changed.{wrong}"

    def _finish(self, tools: Toolbox) -> Drafted | None:
        """Adopt the draft as a version, or tell the model what is missing."""
        draft = self.draft
        missing = [name for name in self.config.sections if name not in draft.sections]
        refusal = f"not finished: {', '.join(missing)} not written" if missing else None
        passed = None
        if refusal is None:
            passed = tools.gate.try_out(draft.sections, draft.citable())
            refusal = passed.refusal
            if refusal is None and passed.unresolved:
                refusal = f"not finished: these lead nowhere: {', '.join(passed.unresolved)}"
        if refusal is not None or passed is None:
            draft.messages.append({"role": "user", "content": refusal})
            self.folder.note("refused", reason=refusal)
            self._save()
            return None
        number = self.folder.adopt(passed.files, self._facts(), self.config.versions_kept)
        draft.is_open, draft.messages = False, []
        self.folder.note("adopted", version=number, spent=draft.spent.plain())
        self._save()
        root = self.folder.root
        return Drafted(number, root / PAPER, root / PDF, draft.spent)

    def _facts(self) -> dict[str, Any]:
        draft = self.draft
        return {
            "run_id": self.evidence.run_id,
            "report_sha256": self.evidence.report_sha256,
            "manifest_sha256": self.evidence.manifest_sha256,
            "proxy": self.evidence.proxy,
            "model": self.config.model,
            "sections": {name: {"sha256": item.hash, "by": item.by} for name, item in draft.sections.items()},
            "citations": draft.cited,
            "records": {identity: asdict(draft.records[identity]) for identity in draft.cited.values()},
            "spent": draft.spent.plain(),
        }

    def _unanswered(self) -> list[dict[str, Any]]:
        """Return the calls of the last reply that have no result yet: some have, after a kill between two."""
        messages = self.draft.messages
        index = max(
            (at for at, message in enumerate(messages) if message["role"] == "assistant"), default=None
        )
        if index is None:
            return []
        answered = {message.get("tool_call_id") for message in messages[index + 1 :]}
        return [call for call in messages[index].get("tool_calls", []) if call["id"] not in answered]

    def _answer(self, tools: Toolbox, call: dict[str, Any]) -> None:
        name, text = call["function"]["name"], call["function"]["arguments"]
        result = tools.call(name, text)
        self.draft.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        self.folder.note("tool", name=name, arguments=text, result=result)
        self._save()

    def _note_request(self, schemas: list[dict[str, Any]]) -> None:
        """Write what a request adds to the one before: all of it together is every request."""
        messages = self.draft.messages
        index = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
        tools = [schema["function"]["name"] for schema in schemas]
        self.folder.note(
            "request",
            model=self.config.model,
            n_messages=len(messages),
            added=messages[index + 1 :],
            tools=tools,
        )

    def _note_attempt(self, event: str, **fields: Any) -> None:
        self.folder.note(event, **fields)
        self._save()  # with what is reserved: a kill in mid-request cannot give it back

    def _save(self) -> None:
        self.draft.save(self.folder.draft_file)
