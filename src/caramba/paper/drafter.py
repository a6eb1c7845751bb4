"""PaperDrafter: the loop between a language model, its tools and the gate, from artifacts to an adopted version."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caramba.config.paper import PaperConfig
from caramba.console import logger
from caramba.paper.arguments import tool_schemas
from caramba.paper.budget import BudgetLedger, Parent, Spent
from caramba.paper.client import LanguageModel, ModelUnusable
from caramba.paper.compile import need_latex
from caramba.paper.draft import load_draft
from caramba.paper.edits import take_edits
from caramba.paper.evidence import Evidence, read_evidence
from caramba.paper.folder import PAPER, PDF, PaperFolder
from caramba.paper.journal import Journal
from caramba.paper.opening import open_draft
from caramba.paper.search import Literature
from caramba.paper.tools import Toolbox
from caramba.runs import lock

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
        journal: Journal | None = None,
        parent: Parent | None = None,
        extend: Callable[[Evidence], Evidence] | None = None,
    ) -> None:
        """Draft by a configuration; `extend` adds to the evidence of the run what a research loop found."""
        self._journal, self._parent, self._extend = journal, parent, extend
        self.config = config or PaperConfig()
        self.output_dir = None if output_dir is None else Path(output_dir).expanduser()
        self._sleep = sleep

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
        evidence = read_evidence(folder, run, group)
        if self._extend is not None:
            evidence = self._extend(evidence)
        paper = PaperFolder(self.output_dir or folder / "paper")
        words = ["caramba", "paper", str(run), *(["--group", group] if group else [])]
        words += ["--output-dir", str(self.output_dir)] if self.output_dir is not None else []
        way_on = f"`{shlex.join([*words, '--update'])}`"
        # What it refuses is refused before anything is written.
        model = LanguageModel(self.config, sleep=self._sleep, way_on=way_on, journal=self._journal)
        price = model.price()
        paper.root.mkdir(parents=True, exist_ok=True)
        with lock(paper.root, "draft"):
            session = _Session(self.config, evidence, paper, self._sleep, group or "")
            open_draft(session.draft, paper, self.config, evidence, group or "", update=update)
            ledger = BudgetLedger(self.config.budget, session.draft.spent, price, way_on, self._parent)
            return session.run(model, ledger)


class _Session:
    """One draft in progress, its folder locked."""

    def __init__(
        self,
        config: PaperConfig,
        evidence: Evidence,
        folder: PaperFolder,
        sleep: Callable[[float], None],
        group: str,
    ) -> None:
        self.config, self.evidence, self.folder, self._sleep = config, evidence, folder, sleep
        self.group = group
        self.draft = load_draft(folder.draft_file)

    def run(self, model: LanguageModel, ledger: BudgetLedger) -> Drafted:
        """Continue an opened draft until a version is adopted."""
        self._save()
        self.folder.note("begun", run=self.evidence.run_id, model=self.config.model)
        server = f" at {self.config.api.base_url}" if self.config.api.base_url else ""
        logger.info(f"paper: {self.config.model}{server} writes in {self.folder.root}")
        literature = Literature(self.config.citations, sleep=self._sleep)

        def ask(messages: list[dict[str, Any]]) -> str:
            return model.ask(messages, [], ledger, self._note_attempt).text

        tools = Toolbox(self.config, self.evidence, self.draft, self.folder, literature, ask)
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
                    reply_tokens=reply.reply_tokens, spent=self.draft.spent.as_dict(),
                )  # fmt: skip
                self._save()

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
        if refusal is None:
            refusal = tools.gate.unknown_digits(draft.sections, draft.citable()) or self._edited_since(tools)
        if refusal is not None or passed is None:
            draft.messages.append({"role": "user", "content": refusal})
            self.folder.note("refused", reason=refusal)
            self._save()
            silent = [message["role"] for message in draft.messages[-2 * MOST_SILENT :]]
            if not draft.sections and silent == ["assistant", "user"] * MOST_SILENT:
                raise ModelUnusable(
                    f"{self.config.model}: {MOST_SILENT} replies without a call and nothing written; take another"
                )
            return None
        number = self.folder.adopt(passed.files, self._facts(), self.config.versions_kept)
        draft.is_open, draft.messages = False, []
        draft.taken_from, draft.taken_sha256, draft.taken = 0, "", {}
        self.folder.note("adopted", version=number, spent=draft.spent.as_dict())
        self._save()
        root = self.folder.root
        return Drafted(number, root / PAPER, root / PDF, draft.spent)

    def _edited_since(self, tools: Toolbox) -> str | None:
        """Take over what a person saved in paper.tex while the draft ran, and say so to the model."""
        taken = take_edits(self.folder, self.draft, tools.gate)
        if taken is None:
            return None
        logger.info(f"paper: keeps what was edited by hand meanwhile in {', '.join(taken) or 'no section'}")
        return (
            f"A person edited the paper meanwhile ({', '.join(taken) or 'nothing that you see'}); read it with "
            "read_tex_file, keep their words, and change only what no longer fits them."
        )

    def _facts(self) -> dict[str, Any]:
        draft = self.draft
        return {
            "run_id": self.evidence.run_id,
            "group": self.group,
            "taken_sha256": draft.taken_sha256,
            "report_sha256": self.evidence.report_sha256,
            "manifest_sha256": self.evidence.manifest_sha256,
            "proxy": self.evidence.proxy,
            "model": self.config.model,
            "sections": {name: {"sha256": item.hash, "by": item.by} for name, item in draft.sections.items()},
            "citations": draft.cited,
            "records": {identity: asdict(draft.records[identity]) for identity in draft.cited.values()},
            "spent": draft.spent.as_dict(),
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
