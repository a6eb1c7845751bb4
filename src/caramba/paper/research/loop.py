"""ResearchLoop: drafts, reviews, runs proposed experiments under the registered test, and redrafts until it stops.

Every finished step is in the ledger and every reply in calls.jsonl before the next begins, so a loop that was killed
repeats no paid call and no finished run.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from caramba.config.paper import PaperConfig, ResearchLoopConfig, ReviewConfig
from caramba.config.parse import parse_as
from caramba.console import logger
from caramba.errors import BudgetExceeded, ConfigError
from caramba.paper.client import ModelUnusable, read_limits
from caramba.paper.compile import need_latex
from caramba.paper.document import read_paper
from caramba.paper.drafter import PaperDrafter
from caramba.paper.evidence import Evidence, read_evidence
from caramba.paper.folder import PAPER, PaperFolder
from caramba.paper.research.appendix import with_experiments
from caramba.paper.research.experiment import Comparison, Launch, launch_run
from caramba.paper.research.journal import CALLS, Journal, RecordedModel
from caramba.paper.research.ledger import Ledger
from caramba.paper.research.proposal import Proposal
from caramba.paper.research.spending import LoopBudget
from caramba.paper.review_tools import proposal_yaml
from caramba.paper.reviewer import PaperReviewer, titles_in
from caramba.runs import lock, read_manifest
from caramba.runs.files import sha256_of, write_json, write_whole

RESULT = "research_loop_result.json"
SMALLEST_GAIN = 0.25
Reason = Literal[
    "approved", "max_iterations", "no_finding_closed", "no_gain", "repeated_paper", "budget", "person", "model_unusable"
]  # fmt: skip
Confirm = Callable[[Proposal], bool]


@dataclass(frozen=True)
class LoopResult:
    """How a loop ended: the typed reason, its rounds, the accepted candidate if any, and what it spent."""

    reason: Reason
    message: str
    rounds: tuple[dict[str, Any], ...]
    winner: str | None
    spent: dict[str, Any]
    file: Path

    @property
    def is_approved(self) -> bool:
        """Whether every gate, the score and the findings allowed approval."""
        return self.reason == "approved"


class _Stop(Exception):  # noqa: N818 - names the event
    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class ResearchLoop:
    """Improves the paper of a run, and the run itself, by one configuration."""

    def __init__(
        self,
        paper_config: PaperConfig | None = None,
        review_config: ReviewConfig | None = None,
        loop_config: ResearchLoopConfig | None = None,
        *,
        output_dir: Path | None = None,
        confirm: Confirm | None = None,
        replay: Path | None = None,
        launch: Launch | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`confirm` answers for a person whether a proposal may run; `replay` is the calls.jsonl of an earlier loop."""
        self.paper_config = paper_config or PaperConfig()
        self.review_config = review_config or ReviewConfig()
        self.config = loop_config or ResearchLoopConfig()
        self.output_dir, self._confirm, self._replay = output_dir, confirm, replay
        self._launch, self._sleep = launch or launch_run, sleep

    async def run(self, run_dir: str | Path) -> LoopResult:
        """Like `run_sync`, in a thread."""
        return await asyncio.to_thread(self.run_sync, run_dir)

    def run_sync(self, run_dir: str | Path | None = None, *, manifest_path: str | Path | None = None) -> LoopResult:
        """Run or resume the loop on a finished run, named by its folder or by its manifest.json.

        Raises:
            ConfigError: what is asked for cannot be begun, or a file of the loop was changed; nothing is paid then.
            AgentError: the language model could not be asked; the same call resumes.
        """
        given = run_dir if manifest_path is None else Path(manifest_path).parent
        if given is None:
            raise ConfigError("ResearchLoop: no run; give run_dir or manifest_path")
        run = Path(given).absolute()
        paper = self.output_dir or run / "paper"
        folder = paper / "research" if self.output_dir else run / "research"
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder, "research"):
            session = _Session(self, run, paper, folder)
            self._check(session)
            return session.run()

    def _check(self, session: _Session) -> None:
        """Refuse, before the first paid call, what would stop the loop later."""
        need_latex("research")
        for config in (self.paper_config, self.review_config.as_paper()):
            model = session.model(config)
            if self._replay is None:
                read_limits(config)
                if self.config.budget.max_cost_usd is not None and model.price() is None:
                    raise ConfigError(
                        f"research.budget.max_cost_usd: what {config.model} costs is not known here; set "
                        "budget.usd_per_million_prompt and usd_per_million_reply, or limit max_tokens alone"
                    )
        gate = self.config.gate
        if gate is not None and (gate.held_out is None or not Path(gate.held_out).exists()):
            raise ConfigError(
                f"research.gate.held_out={gate.held_out}: no held-out tokens there; name a token folder, .npy or "
                ".tokens that the base run does not read"
            )


class _Session:
    """One loop in progress, its folder locked."""

    def __init__(self, loop: ResearchLoop, run: Path, paper: Path, folder: Path) -> None:
        self.loop, self.config, self.run_dir, self.paper = loop, loop.config, run, paper
        self.manifest = read_manifest(run)
        self.budget = LoopBudget(folder, loop.config.budget)
        self.journal = Journal(folder / CALLS, loop._replay)
        self.model = functools.partial(RecordedModel, self.journal, self.budget)
        self.comparison: Comparison | None = None
        if loop.config.gate is not None:
            timeout_s = loop.config.experiment_timeout_s
            self.comparison = Comparison(folder, run, loop.config.gate, timeout_s=timeout_s, launch=self._launch)
        self.ledger = Ledger(folder) if self.comparison is None else self.comparison.ledger
        self.rounds: list[dict[str, Any]] = []

    def run(self) -> LoopResult:
        try:
            for number in range(1, self.config.max_iterations + 1):
                self._round(number)
            raise _Stop("max_iterations", f"{self.config.max_iterations} rounds without approval")
        except _Stop as stop:
            return self._end(stop.reason, str(stop))
        except BudgetExceeded as error:
            return self._end("budget", str(error))
        except ModelUnusable as error:
            return self._end("model_unusable", str(error))

    def _round(self, number: int) -> None:
        self.rounds.append({"iteration": number})
        drafted = self._draft(number)
        hashes = [item["paper_sha256"] for item in self.rounds[:-1]]
        self.rounds[-1] |= {"version": drafted["version"], "paper_sha256": drafted["paper_sha256"]}
        if drafted["paper_sha256"] in hashes:
            raise _Stop("repeated_paper", f"round {number} wrote the paper of an earlier round")
        reviewed = self._review(number)
        self.rounds[-1] |= {key: reviewed[key] for key in ("score", "action", "open", "blocking")}
        self._decide(reviewed)
        self.rounds[-1]["experiments"] = self._experiments(reviewed["proposals"])

    def _draft(self, number: int) -> dict[str, Any]:
        recorded = self._line("draft", number)
        if recorded is not None:
            return recorded
        begun = self._line("draft_begun", number)
        if begun is None:
            begun = self.ledger.append("draft_begun", iteration=number, version=self._version())
        if "version" not in begun:
            raise ConfigError(
                f"{self.ledger.file}, line {begun['n']}: a round that an earlier caramba began; move its folder away "
                "and begin the loop again"
            )
        if self._version() == begun["version"]:  # else a kill came between the version and its line
            self.journal.step = f"iter{number}/draft"
            drafter = PaperDrafter(
                self._paper_config(number), self.paper, sleep=self.loop._sleep, model=self.model,
                extend=self._extended,
            )  # fmt: skip
            drafter.draft_sync(self.run_dir, update=True)
        head = PaperFolder(self.paper).head() or {}
        digest = sha256_of(self.paper / PAPER)
        logger.info(f"research: round {number}, version {head['version']}")
        return self.ledger.append("draft", iteration=number, version=head["version"], paper_sha256=digest)

    def _paper_config(self, number: int) -> PaperConfig:
        """Return the drafter's configuration with the findings that are open."""
        config = self.loop.paper_config
        keep = None if self.config.save_all_versions else 1
        config = config.model_copy(update={"max_versions": keep, "auto_version": keep is None})
        last = self._line("review", number - 1)
        if last is None:
            return config
        file = self.paper / last["file"]
        findings = json.loads(file.read_text(encoding="utf-8"))["findings"]
        told = "\n".join(f"- {item['section']}, {item['place']}: {item['text']}" for item in findings)
        asked = f"A review of the last version found, to be mended by update_section:\n{told or '- nothing'}"
        if self.ledger.of("decision"):
            asked += "\nExperiments were run since; get_experiment_results with prefix research. lists them."
        words = "\n".join(part for part in (config.custom_instructions, asked) if part)
        return config.model_copy(update={"custom_instructions": words})

    def _extended(self, evidence: Evidence) -> Evidence:
        gate = self.config.gate
        return evidence if gate is None else with_experiments(evidence, self.ledger.events, gate.metric)

    def _review(self, number: int) -> dict[str, Any]:
        name = f"review_iter{number}.json"
        recorded = self._line("review", number)
        if recorded is not None:
            if sha256_of(self.paper / name) != recorded["file_sha256"]:
                raise ConfigError(f"{self.paper / name}: not the review of {self.ledger.file}, line {recorded['n']}")
            return recorded
        self.journal.step = f"iter{number}/review"
        evidence = self._extended(read_evidence(self.run_dir, self.run_dir))
        head = PaperFolder(self.paper).head() or {}
        sections = read_paper(self.paper / PAPER)
        reviewer = PaperReviewer(self.loop.review_config, sleep=self.loop._sleep, model=self.model)
        review = reviewer.review(sections, evidence, titles_in(head, sections), self.manifest)
        known = {identity for line in self.ledger.of("review") for identity in line["open"]}
        # After the first round only blocking findings may be new: a reviewer may not manufacture minor ones.
        kept = [item for item in review.findings if number == 1 or item.is_blocking or item.id in known]
        review = dataclasses.replace(review, findings=tuple(kept))
        plain = {**review.as_dict(self.loop.review_config), "iteration": number, "run_id": evidence.run_id}
        plain |= {"paper_sha256": sha256_of(self.paper / PAPER), "report_sha256": evidence.report_sha256}
        write_json(self.paper / name, plain)
        proposals = [item.model_dump(mode="json") for item in review.proposals.values()]
        for proposal in review.proposals.values():
            write_whole(self.paper / f"proposed_{proposal.name}.yml", proposal_yaml(proposal))
        self.ledger.append("spend", iteration=number, **self.budget.as_dict())
        return self.ledger.append(
            "review", iteration=number, file=name, file_sha256=sha256_of(self.paper / name), score=review.score,
            action=review.action, open=[item.id for item in kept], blocking=len(review.blocking), proposals=proposals,
        )  # fmt: skip

    def _decide(self, reviewed: dict[str, Any]) -> None:
        """Stop where the paper is approved or nothing improves."""
        score, config = float(reviewed["score"]), self.config
        has_consent = reviewed["action"] == "approve" or score >= config.auto_approve_score
        if score >= config.min_score_to_approve and has_consent and not reviewed["blocking"]:
            raise _Stop("approved", f"score {score:g}, no blocking finding")
        earlier = self.rounds[:-1]
        if earlier and earlier[-1]["open"] and set(earlier[-1]["open"]) <= set(reviewed["open"]):
            raise _Stop("no_finding_closed", "the last round closed no finding")
        scores = [item["score"] for item in self.rounds]
        gains = [after - before for before, after in itertools.pairwise(scores)]
        if len(gains) >= 2 and max(gains[-2:]) < SMALLEST_GAIN:
            raise _Stop("no_gain", f"two rounds gained less than {SMALLEST_GAIN}")

    def _experiments(self, proposals: Sequence[dict[str, Any]]) -> list[str]:
        """Run the proposals of a round until one is accepted, and open the held-out tokens for it."""
        ran: list[str] = []
        if self.comparison is None:
            return ran
        for plain in proposals[: self.config.max_experiments_per_iteration]:
            known = [line["proposal"]["name"] for line in self.ledger.of("proposal")]
            is_new = plain["name"] not in known
            if any(line["proposal"] == plain["name"] for line in self.ledger.of("decision")):
                ran.append(plain["name"])
                continue
            if self._winner() is not None or (is_new and len(known) >= self.config.max_total_experiments):
                break
            proposal = parse_as(Proposal, plain)
            _check_file(self.paper / f"proposed_{proposal.name}.yml", proposal_yaml(proposal))
            may_run = self.config.auto_run_experiments or (self.loop._confirm or (lambda item: False))(proposal)
            if is_new and not may_run:
                raise _Stop(
                    "person",
                    f"{proposal.name} waits for a person: read proposed_{proposal.name}.yml, confirm",
                )
            self.comparison.run(proposal)
            ran.append(proposal.name)
        winner = self._winner()
        if winner is not None:
            plain = next(line["proposal"] for line in self.ledger.of("proposal") if line["proposal"]["name"] == winner)
            self.comparison.open_held_out(parse_as(Proposal, plain))
        return ran

    def _winner(self) -> str | None:
        accepted = [line["proposal"] for line in self.ledger.of("decision") if line["state"] == "accepted"]
        return accepted[0] if accepted else None

    def _launch(self, command: Sequence[str], folder: Path, timeout_s: float | None) -> int:
        """Launch a run whose hours are reserved in full."""
        hours = self.config.experiment_timeout_s / 3600
        self.budget.reserve(gpu_hours=hours)
        began = time.monotonic()
        status = self.loop._launch(command, folder, timeout_s)
        self.budget.book(gpu_hours=min((time.monotonic() - began) / 3600, hours) - hours)
        return status

    def _end(self, reason: Reason, message: str) -> LoopResult:
        last = self.ledger.of("stop")[-1:]
        if not last or last[0]["n"] != len(self.ledger.events) or last[0]["reason"] != reason:
            self.ledger.append("stop", reason=reason, message=message, **self.budget.as_dict())
        result = LoopResult(
            reason, message, tuple(self.rounds), self._winner(), self.budget.as_dict(), self.paper / RESULT
        )
        plain = {key: value for key, value in dataclasses.asdict(result).items() if key != "file"}
        self.paper.mkdir(parents=True, exist_ok=True)
        write_json(
            result.file,
            {"schema": 1, "run_id": self.run_dir.name, "is_approved": result.is_approved, **plain},
        )
        return result

    def _line(self, event: str, number: int) -> dict[str, Any] | None:
        return next((line for line in self.ledger.of(event) if line["iteration"] == number), None)

    def _version(self) -> int:
        """Return the number of the paper's newest version, 0 where there is none."""
        return (PaperFolder(self.paper).head() or {"version": 0})["version"]


def _check_file(file: Path, expected: str) -> None:
    """Refuse a proposal that was edited after the review that made it."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    wanted = expected.splitlines()
    if lines != wanted:
        pairs = enumerate(zip([*lines, ""], [*wanted, ""], strict=False), 1)
        number = next((at for at, (one, other) in pairs if one != other), len(lines))
        raise ConfigError(f"{file}, line {number}: not what the review proposed; put the file back, or propose again")
