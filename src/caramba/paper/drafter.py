"""PaperDrafter: the loop between a language model, its tools and the gate, from artifacts to an adopted version."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from caramba.config.paper import PaperConfig
from caramba.console import logger
from caramba.paper.arguments import tool_schemas
from caramba.paper.budget import BudgetLedger, Parent, Spent
from caramba.paper.client import LanguageModel, ModelReply, ModelUnusable
from caramba.paper.compile import need_latex
from caramba.paper.draft import Draft, load_draft
from caramba.paper.evidence import Evidence, read_evidence
from caramba.paper.folder import PAPER, PDF, PaperFolder
from caramba.paper.gate import Passed
from caramba.paper.journal import Journal
from caramba.paper.opening import open_draft, take_edits
from caramba.paper.search import Literature
from caramba.paper.tools import Toolbox
from caramba.paper.transport import at_server
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
            draft = load_draft(paper.draft_file)
            open_draft(draft, paper, self.config, evidence, group or "", update=update)
            ledger = BudgetLedger(self.config.budget, draft.spent, price, way_on, self._parent)
            return _Session(self.config, evidence, paper, draft, model, ledger, self._sleep).run()


class _Session:
    """One opened draft in progress, its folder locked."""

    def __init__(
        self,
        config: PaperConfig,
        evidence: Evidence,
        folder: PaperFolder,
        draft: Draft,
        model: LanguageModel,
        ledger: BudgetLedger,
        sleep: Callable[[float], None],
    ) -> None:
        self.config, self.evidence, self.folder, self.draft = config, evidence, folder, draft
        self.model, self.ledger = model, ledger
        literature = Literature(config.citations, sleep=sleep)
        self.tools = Toolbox(
            config, evidence, draft, folder, literature, lambda messages: self._ask(messages).text
        )
        self.schemas = tool_schemas(self.tools.names())

    def run(self) -> Drafted:
        """Continue until a version is adopted."""
        self._note("begun", run=self.evidence.run_id, model=self.config.model)
        logger.info(f"paper: {self.config.model}{at_server(self.config.api)} writes in {self.folder.root}")
        while True:
            messages = self.draft.messages
            index = max((at for at, item in enumerate(messages) if item["role"] == "assistant"), default=-1)
            # Some calls of the last reply may have a result already, after a kill between two.
            answered = {message.get("tool_call_id") for message in messages[index + 1 :]}
            calls = [] if index < 0 else messages[index].get("tool_calls", [])
            if pending := [call for call in calls if call["id"] not in answered]:
                for call in pending:
                    name, text = call["function"]["name"], call["function"]["arguments"]
                    result = self.tools.call(name, text)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
                    self._note("tool", name=name, arguments=text, result=result)
            elif messages[-1]["role"] == "assistant":
                adopted = self._finish()
                if adopted is not None:
                    return adopted
            else:
                self.ledger.begin()
                logger.info(
                    f"paper: request {self.draft.spent.iterations} of at most {self.config.budget.max_iterations}"
                )
                # What a request adds to the one before: all of it together is every request.
                self.folder.note(
                    "request", model=self.config.model, added=messages[index + 1 :], tools=self.tools.names()
                )
                reply = self._ask(messages, self.schemas)
                messages.append(reply.message())
                self._note("reply", **asdict(reply), spent=self.draft.spent.as_dict())

    def _ask(self, messages: list[dict[str, Any]], schemas: Sequence[dict[str, Any]] = ()) -> ModelReply:
        return self.model.ask(messages, list(schemas), self.ledger, self._note)

    def _finish(self) -> Drafted | None:
        """Adopt the draft as a version, or tell the model what is missing."""
        draft, gate = self.draft, self.tools.gate
        missing = [name for name in self.config.sections if name not in draft.sections]
        unwritten = Passed(refusal=f"not finished: {', '.join(missing)} not written")
        passed = unwritten if missing else gate.try_out(draft.sections, draft.citable())
        refusal = passed.refusal
        if refusal is None and passed.unresolved:
            refusal = f"not finished: these lead nowhere: {', '.join(passed.unresolved)}"
        refusal = refusal or gate.unknown_digits(draft.sections, draft.citable()) or self._edited_since()
        if refusal is not None:
            draft.messages.append({"role": "user", "content": refusal})
            self._note("refused", reason=refusal)
            silent = [message["role"] for message in draft.messages[-2 * MOST_SILENT :]]
            if not draft.sections and silent == ["assistant", "user"] * MOST_SILENT:
                raise ModelUnusable(
                    f"{self.config.model}: {MOST_SILENT} replies without a call and nothing written; take another"
                )
            return None
        number = self.folder.adopt(passed.files, self._facts(), self.config.versions_kept)
        draft.is_open, draft.messages = False, []
        draft.taken_from, draft.taken_sha256, draft.taken = 0, "", {}
        self._note("adopted", version=number, spent=draft.spent.as_dict())
        return Drafted(number, self.folder.root / PAPER, self.folder.root / PDF, draft.spent)

    def _edited_since(self) -> str | None:
        """Take over what a person saved in paper.tex while the draft ran, and say so to the model."""
        taken = take_edits(self.folder, self.draft, self.tools.gate)
        if taken is None:
            return None
        logger.info(f"paper: keeps what was edited by hand meanwhile in {', '.join(taken) or 'no section'}")
        return (
            f"A person edited the paper meanwhile ({', '.join(taken) or 'nothing that you see'}); read it with "
            "read_tex_file, keep their words, and change only what no longer fits them."
        )

    def _facts(self) -> dict[str, Any]:
        draft, names = self.draft, ("run_id", "report_sha256", "manifest_sha256", "proxy")
        return {
            **{name: getattr(self.evidence, name) for name in names},
            "group": draft.group,
            "taken_sha256": draft.taken_sha256,
            "model": self.config.model,
            "sections": {name: {"sha256": item.hash, "by": item.by} for name, item in draft.sections.items()},
            "citations": draft.cited,
            "records": {identity: asdict(draft.records[identity]) for identity in draft.cited.values()},
            "spent": draft.spent.as_dict(),
        }

    def _note(self, event: str, **fields: Any) -> None:
        """Note an event, and save the draft with what is reserved: a kill in mid-request cannot give it back."""
        self.folder.note(event, **fields)
        self._save()

    def _save(self) -> None:
        self.draft.save(self.folder.draft_file)
