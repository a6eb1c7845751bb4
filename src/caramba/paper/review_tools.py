"""What a reviewer can do: read the paper and the results, ask for the checks by rule, propose, and submit a review."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated

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
from caramba.paper.tools import Prefix, Result, Tools, Words, list_items
from caramba.runs.manifest import manifest_sha256

MOST_FINDINGS = 20
Topics = Annotated[tuple[Words, ...], Field(min_length=1, max_length=20)]
Effect = Annotated[float, Field(ge=0)]
Summary = Annotated[str, Field(min_length=1, max_length=4000)]


class FindingGiven(Config):
    """What a reviewer found."""

    topic: Topic
    section: SectionName
    place: Annotated[str, Field(max_length=200, description="a key of the results, or the section again")]
    text: Words
    is_blocking: bool = False


Findings = Annotated[tuple[FindingGiven, ...], Field(max_length=MOST_FINDINGS)]


@dataclass(frozen=True)
class Submitted:
    """A review as the reviewer submitted it."""

    score: float
    action: Action
    summary: str
    findings: tuple[FindingGiven, ...]


class ReviewToolbox:
    """The tools of one review; `submitted` is the review once it was accepted."""

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
        self.submitted: Submitted | None = None
        may_propose = config.auto_generate_experiments and config.max_proposed_experiments > 0
        proposing = (self.propose_experiment, self.generate_experiment_manifest) if may_propose else ()
        tools = (
            self.analyze_paper_structure, self.check_experimental_claims, self.check_citation_coverage,
            self.read_paper_section, self.get_experiment_results_summary, *proposing, self.submit_review,
        )  # fmt: skip
        self.tools: Tools = {tool.__name__: tool for tool in tools}

    def analyze_paper_structure(self) -> Result:
        """Count words, figures, tables, citations and results of every section."""
        return {name: _counts(body) for name, body in self.sections.items()}

    def check_experimental_claims(self) -> Result:
        """Run the checks by rule: baselines, seeds, directions, claims, proxies, intervals."""
        return {"findings": [{"id": item.id, **asdict(item)} for item in check_paper(self.sections, self.evidence)]}

    def check_citation_coverage(self, topics: Topics) -> Result:
        """Tell for topics whether a cited work's title names them."""
        titles = " ".join(self.titles.values()).lower()
        covered = {topic: all(word in titles for word in topic.lower().split()) for topic in topics}
        return {"n_citations": len(self.titles), "covered": covered}

    def read_paper_section(self, section: SectionName) -> Result:
        """Read one section as LaTeX."""
        if section not in self.sections:
            raise AgentError(f"{section}: not in the paper, which has {', '.join(self.sections)}")
        return {"body": self.sections[section]}

    def get_experiment_results_summary(self, prefix: Prefix = "") -> Result:
        """List what was measured: key, value, unit, dispersion and number of samples."""
        results = {key: asdict(item) for key, item in self.evidence.results.items()}
        return {**list_items("results", results, prefix), "failures": list(self.evidence.failures)}

    def propose_experiment(
        self,
        name: Words,
        rationale: Words,
        hypothesis: Words,
        smallest_effect: Effect,
        patches: Patches,
        trials: Annotated[Trials, Field(description=TRIALS)] = (),
    ) -> Result:
        """Propose one change of the training, to be run against the same baseline under a registered test."""
        if name not in self.proposals and len(self.proposals) >= self.config.max_proposed_experiments:
            raise AgentError(f"{len(self.proposals)} experiments are proposed, as many as review allows")
        proposal = parse_as(Proposal, {
            "name": name, "base_sha256": manifest_sha256(self.base), "rationale": rationale, "hypothesis": hypothesis,
            "smallest_effect": smallest_effect, "patches": patches, "trials": trials,
        })  # fmt: skip
        arm_manifest(self.base, 1, proposal)
        self.proposals[proposal.name] = proposal
        return {"accepted": proposal.name}

    def generate_experiment_manifest(self, name: Words) -> Result:
        """Return a proposed experiment's file, whose manifest was composed and validated."""
        if name not in self.proposals:
            raise AgentError(f"{name!r} was not proposed; call propose_experiment first")
        return {"yaml": proposal_yaml(self.proposals[name])}

    def submit_review(self, score: Score, action: Action, summary: Summary, findings: Findings = ()) -> Result:
        """Submit the review; ends it."""
        for item in findings:
            if item.section not in self.sections:
                raise AgentError(f"finding on {item.section}, which the paper lacks; cite one it has")
            if item.place not in self.evidence.results and item.place not in self.sections:
                raise AgentError(
                    f"{item.place!r} is no section and no result{nearest(item.place, self.evidence.results) or ''}; "
                    "every finding cites one"
                )
        if action == "new_experiment" and not self.proposals:
            raise AgentError("new_experiment without a proposal; call propose_experiment, or take another action")
        self.submitted = Submitted(score, action, summary, findings)
        return {"accepted": True}


def proposal_yaml(proposal: Proposal) -> str:
    """Return a proposal as its file has it."""
    return yaml.safe_dump(proposal.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


def as_findings(given: Submitted, config: ReviewConfig) -> list[Reviewed]:
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
