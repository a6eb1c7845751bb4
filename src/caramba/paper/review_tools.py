"""What a reviewer can do: read the paper and the results, ask for the checks by rule, propose, and submit a review."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import yaml
from pydantic import Field

from caramba.config.base import Config
from caramba.config.manifest import Manifest
from caramba.config.paper import Action, ReviewConfig, Score, SectionName, Topic
from caramba.config.parse import parse_as
from caramba.errors import AgentError, nearest
from caramba.paper.evidence import Evidence
from caramba.paper.research.proposal import TRIALS, Patches, Proposal, Trials, arm_manifest
from caramba.paper.review import Reviewed, check_paper
from caramba.paper.tools import Prefix, Words, by_name, call_tool
from caramba.runs.manifest import manifest_sha256

MOST_FINDINGS, MOST_LISTED = 20, 100


class AnalyzePaperStructure(Config):
    """Count words, figures, tables, citations and results of every section."""


class CheckExperimentalClaims(Config):
    """Run the checks by rule: baselines, seeds, directions, claims, proxies, intervals."""


class CheckCitationCoverage(Config):
    """Tell for topics whether a cited work's title names them."""

    topics: Annotated[tuple[Words, ...], Field(min_length=1, max_length=20)]


class ReadPaperSection(Config):
    """Read one section as LaTeX."""

    section: SectionName


class GetExperimentResultsSummary(Config):
    """List what was measured: key, value, unit, dispersion and number of samples."""

    prefix: Prefix = ""


class ProposeExperiment(Config):
    """Propose one change of the training, to be run against the same baseline under a registered test."""

    name: Words
    rationale: Words
    hypothesis: Words
    smallest_effect: Annotated[float, Field(ge=0)]
    patches: Patches
    trials: Trials = Field(default=(), description=TRIALS)


class GenerateExperimentManifest(Config):
    """Return a proposed experiment's file, whose manifest was composed and validated."""

    name: Words


class FindingGiven(Config):
    topic: Topic
    section: SectionName
    place: Annotated[str, Field(max_length=200, description="a key of the results, or the section again")]
    text: Words
    is_blocking: bool = False


class SubmitReview(Config):
    """Submit the review; ends it."""

    score: Score
    action: Action
    summary: Annotated[str, Field(min_length=1, max_length=4000)]
    findings: Annotated[tuple[FindingGiven, ...], Field(max_length=MOST_FINDINGS)] = ()


REVIEW_TOOLS = by_name(
    AnalyzePaperStructure, CheckExperimentalClaims, CheckCitationCoverage, ReadPaperSection,
    GetExperimentResultsSummary, ProposeExperiment, GenerateExperimentManifest, SubmitReview,
)  # fmt: skip
_PROPOSING = ("propose_experiment", "generate_experiment_manifest")


class ReviewToolbox:
    """Answers the calls of one review; `submitted` is the review once it was accepted."""

    def __init__(
        self,
        config: ReviewConfig,
        evidence: Evidence,
        sections: Mapping[str, str],
        titles: Mapping[str, str],
        base: Manifest,
    ) -> None:
        self.config, self.evidence, self.sections, self.titles = config, evidence, sections, titles
        self.base = base
        self.proposals: dict[str, Proposal] = {}
        self.submitted: SubmitReview | None = None

    def tools(self) -> dict[str, type[Config]]:
        """Return the tools of this review."""
        may_propose = self.config.auto_generate_experiments and self.config.max_proposed_experiments > 0
        return {name: tool for name, tool in REVIEW_TOOLS.items() if may_propose or name not in _PROPOSING}

    def call(self, name: str, text: str) -> str:
        """Carry out a call and return its result as JSON."""
        return call_tool(name, text, self.tools(), self._answer)

    def _answer(self, asked: Config) -> dict[str, Any]:
        match asked:
            case AnalyzePaperStructure():
                return {name: _counts(body) for name, body in self.sections.items()}
            case CheckExperimentalClaims():
                found = check_paper(self.sections, self.evidence)
                return {"findings": [{"id": item.id, **asdict(item)} for item in found]}
            case CheckCitationCoverage():
                titles = " ".join(self.titles.values()).lower()
                covered = {topic: all(word in titles for word in topic.lower().split()) for topic in asked.topics}
                return {"n_citations": len(self.titles), "covered": covered}
            case ReadPaperSection():
                if asked.section not in self.sections:
                    raise AgentError(f"{asked.section}: not in the paper, which has {', '.join(self.sections)}")
                return {"body": self.sections[asked.section]}
            case GetExperimentResultsSummary():
                keys = [key for key in self.evidence.results if key.startswith(asked.prefix)]
                shown = {key: asdict(self.evidence.results[key]) for key in keys[:MOST_LISTED]}
                left = len(keys) - len(shown)
                return {"results": shown, "left_out": left, "failures": list(self.evidence.failures)}
            case ProposeExperiment():
                return self._propose(asked)
            case GenerateExperimentManifest():
                if asked.name not in self.proposals:
                    raise AgentError(f"{asked.name!r} was not proposed; call propose_experiment first")
                return {"yaml": proposal_yaml(self.proposals[asked.name])}
            case SubmitReview():
                return self._submit(asked)
            case _:
                raise AssertionError("unreachable")

    def _propose(self, asked: ProposeExperiment) -> dict[str, Any]:
        if asked.name not in self.proposals and len(self.proposals) >= self.config.max_proposed_experiments:
            raise AgentError(f"{len(self.proposals)} experiments are proposed, as many as review allows")
        plain = {**asked.model_dump(mode="json"), "base_sha256": manifest_sha256(self.base)}
        proposal = parse_as(Proposal, plain)
        arm_manifest(self.base, 1, proposal)
        self.proposals[proposal.name] = proposal
        return {"accepted": proposal.name}

    def _submit(self, asked: SubmitReview) -> dict[str, Any]:
        for item in asked.findings:
            if item.section not in self.sections:
                raise AgentError(f"finding on {item.section}, which the paper lacks; cite one it has")
            if item.place not in self.evidence.results and item.place not in self.sections:
                raise AgentError(
                    f"{item.place!r} is no section and no result{nearest(item.place, self.evidence.results) or ''}; "
                    "every finding cites one"
                )
        if asked.action == "new_experiment" and not self.proposals:
            raise AgentError("new_experiment without a proposal; call propose_experiment, or take another action")
        self.submitted = asked
        return {"accepted": True}


def proposal_yaml(proposal: Proposal) -> str:
    """Return a proposal as its file has it."""
    return yaml.safe_dump(proposal.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


def as_findings(given: SubmitReview, config: ReviewConfig) -> list[Reviewed]:
    """Return what a reviewer found within the topics that are reviewed, each id once."""
    found: dict[str, Reviewed] = {}
    for item in given.findings:
        if item.topic in config.topics:
            made = Reviewed(f"reviewer_{item.topic}", item.section, item.place, item.text, item.is_blocking)
            found.setdefault(made.id, made)
    return list(found.values())


def _counts(body: str) -> dict[str, int]:
    patterns = {"figures": r"\\artifactfigure\{", "tables": r"\\artifacttable\{|\\begin\{tabular\}",
                "citations": r"\\cite\w*\{", "results": r"\\(?:result|resultvalue|derived)\{"}  # fmt: skip
    words = len(re.sub(r"\\[A-Za-z]+|[{}]", " ", body).split())
    return {"words": words, **{name: len(re.findall(pattern, body)) for name, pattern in patterns.items()}}
