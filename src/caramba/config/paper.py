"""Schema of `paper:`: what is drafted from a run's artifacts, by which language model, within which budget."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, NonNegativeInt, PositiveFloat, field_validator, model_validator

from caramba.config.base import Config, PathText
from caramba.config.layer_base import Positive
from caramba.errors import is_secret, quote

SectionName = Literal[
    "abstract",
    "introduction",
    "related_work",
    "background",
    "methodology",
    "experiments",
    "results",
    "discussion",
    "limitations",
    "conclusion",
    "appendix",
]
SECTIONS: tuple[SectionName, ...] = get_args(SectionName)
SourceName = Literal["arxiv", "semantic_scholar"]

Seconds = Annotated[float, Field(gt=0, le=3600)]


class CitationsConfig(Config):
    """Where citations come from: records that a search returned, or a .bib file of one's own."""

    enabled: bool = Field(default=True, description="false: nothing is searched; only `bibliography` is cited")
    max_citations: Positive = Field(default=25, description="most citations of a paper")
    sources: tuple[SourceName, ...] = Field(
        default=("arxiv", "semantic_scholar"),
        description="services that are searched: arxiv, semantic_scholar",
    )
    prefer_recent: bool = Field(default=True, description="newer records first among those that a search returns")
    recent_years: Positive = Field(default=3, description="what counts as recent")
    bibliography: str | None = Field(default=None, description="a .bib file whose entries may be cited")
    timeout_s: Seconds = Field(default=20.0, description="time limit of one search, in seconds")


_PLAIN_NAME = re.compile(r"[A-Z]+(_[A-Z]+)+[0-9]?")


class ApiConfig(Config):
    """How the language model is reached. A key is named by its environment variable and never written in a manifest."""

    base_url: str | None = Field(default=None, description="an OpenAI-compatible server, such as http://host:8000/v1")
    key_env: str | None = Field(
        default=None, description="the environment variable that holds the key; by default the provider's own"
    )
    tools: Literal["auto", "native", "text"] = Field(
        default="auto",
        description="how tools are called: native, text (schemas in the prompt, JSON in the answer), or auto, which "
        "takes text where the server refuses tools",
    )
    timeout_s: Seconds = Field(default=120.0, description="of one request")
    retries: Annotated[int, Field(ge=0, le=10)] = Field(
        default=3, description="further attempts after a 429, a 5xx, a timeout or an answer that is no JSON"
    )
    max_wait_s: Seconds = Field(default=60.0, description="longest pause between attempts, whatever a server asks for")

    @field_validator("key_env")
    @classmethod
    def _is_name(cls, value: str | None) -> str | None:
        """Refuse what is no name, such as the key itself, without printing it."""
        if value is not None and (is_secret(value) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value)):
            raise ValueError(
                "got a text that is no name of an environment variable (not printed, since it may be the key itself); "
                "export the key and give the variable's name"
            )
        return value

    @property
    def shown_key_env(self) -> str:
        """The variable's name for messages, or a placeholder for a text that may be a key itself."""
        return str(self.key_env) if _PLAIN_NAME.fullmatch(self.key_env or "") else "…"

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parts = urlsplit(value)
                is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            except ValueError:
                is_url = False
            if not is_url:
                raise ValueError(f"{quote(value)} is no http(s) address; write one such as http://localhost:8000/v1")
            if urlsplit(value).username or urlsplit(value).password:
                raise ValueError("an address may not hold a key; name its environment variable in api.key_env")
        return value


class BudgetConfig(Config):
    """What one draft may spend. Every request is reserved in full before it is sent."""

    max_iterations: Positive = Field(default=40, description="requests to the language model, repeated ones included")
    max_tokens: Positive = Field(default=1_000_000, description="prompt and reply tokens of all requests")
    max_reply_tokens: Positive = Field(default=8192, description="tokens of one reply")
    max_cost_usd: PositiveFloat | None = Field(
        default=None, description="needs a model whose price is known, or the two below"
    )
    usd_per_million_prompt: PositiveFloat | None = Field(
        default=None,
        description="price of a million prompt tokens, in US dollars; unset: as litellm knows it",
    )
    usd_per_million_reply: PositiveFloat | None = Field(
        default=None, description="price of a million reply tokens, in US dollars; unset: as litellm knows it"
    )

    @model_validator(mode="after")
    def _both_prices(self) -> BudgetConfig:
        if (self.usd_per_million_prompt is None) != (self.usd_per_million_reply is None):
            raise ValueError("a price has two parts; set usd_per_million_prompt and usd_per_million_reply")
        return self


class PaperConfig(Config):
    """A paper that is drafted from the artifacts of a run once it has finished."""

    enabled: bool = Field(default=True, description="whether a paper is drafted after the run")
    title: str | None = Field(default=None, min_length=1, description="by default the experiment's name")
    authors: tuple[str, ...] = Field(default=(), description="names of the authors")
    paper_type: Literal["paper", "technical_report", "arxiv"] = Field(
        default="paper", description="paper, technical_report or arxiv"
    )
    sections: Annotated[tuple[SectionName, ...], Field(min_length=1)] = Field(
        default=(
            "abstract",
            "introduction",
            "related_work",
            "methodology",
            "experiments",
            "results",
            "discussion",
            "conclusion",
        ),
        description="sections of the paper, in order",
    )
    keywords: tuple[str, ...] = Field(default=(), description="what citations are searched by")
    custom_instructions: str = Field(default="", description="further words for the language model")
    citations: CitationsConfig = Field(default=CitationsConfig(), description="where citations come from")
    model: str = Field(default="gpt-4o", min_length=1, description="as litellm names it: gpt-4o, anthropic/…, ollama/…")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="by default the model's own; some models take none"
    )
    api: ApiConfig = Field(default=ApiConfig(), description="how the language model is reached")
    budget: BudgetConfig = Field(default=BudgetConfig(), description="what a draft may spend")
    auto_version: bool = Field(default=True, description="false: only the newest version is kept")
    max_versions: Positive | None = Field(default=None, description="versions that are kept; by default all")

    @model_validator(mode="after")
    def _distinct_sections(self) -> PaperConfig:
        twice = next((name for name in self.sections if self.sections.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"section {quote(twice)} is listed twice; name each once")
        return self

    def reaches_out(self) -> tuple[str, ...]:
        """Return the keys that are set and name a server, a variable of the environment or a file."""
        named = {
            "api.base_url": self.api.base_url,
            "api.key_env": self.api.key_env,
            "citations.bibliography": self.citations.bibliography,
        }
        return tuple(key for key, value in named.items() if value is not None)

    @property
    def versions_kept(self) -> int | None:
        """How many versions stay on disk, None for all."""
        return self.max_versions if self.auto_version else 1


Strictness = Literal["workshop", "conference", "journal", "top_venue"]
Persona = Literal["senior_researcher", "methodology_expert", "practitioner"]
Action = Literal["approve", "style_fix", "clarification", "new_experiment", "major_revision"]
Topic = Literal["methodology", "experiments", "results", "writing", "citations"]
TOPICS: tuple[Topic, ...] = get_args(Topic)
Score = Annotated[float, Field(ge=0, le=10)]


class ReviewConfig(Config):
    """A review of a paper against its run: checks by rule, then a language model as reviewer."""

    enabled: bool = Field(default=True, description="false: checks by rule alone, without a model")
    strictness: Strictness = Field(
        default="conference", description="bar of the review: workshop, conference, journal or top_venue"
    )
    reviewer_persona: Persona = Field(
        default="senior_researcher", description="senior_researcher, methodology_expert or practitioner"
    )
    check_methodology: bool = Field(default=True, description="whether the design of the experiment is reviewed")
    check_experiments: bool = Field(default=True, description="whether missing experiments are reviewed")
    check_results: bool = Field(default=True, description="whether results and claims are reviewed")
    check_writing: bool = Field(default=True, description="whether structure and text are reviewed")
    check_citations: bool = Field(default=True, description="whether citations are reviewed")
    min_score_to_approve: Score = Field(default=7.0, description="score, of 10, from which a paper can be approved")
    auto_generate_experiments: bool = Field(default=True, description="whether the reviewer may propose experiments")
    max_proposed_experiments: Annotated[int, Field(ge=0, le=20)] = Field(
        default=3, description="most experiments that one review proposes"
    )
    model: str = Field(default="gpt-4o", min_length=1, description="language model, as in `paper.model`")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        default=None, description="by default the model's own; some models take none"
    )
    api: ApiConfig = Field(default=ApiConfig(), description="how the language model is reached")
    budget: BudgetConfig = Field(default=BudgetConfig(), description="what one review may spend")

    @property
    def topics(self) -> tuple[Topic, ...]:
        """What is reviewed."""
        return tuple(topic for topic in TOPICS if getattr(self, f"check_{topic}"))

    def as_paper(self) -> PaperConfig:
        """Return how the reviewer's model is asked, as a drafter's configuration."""
        return PaperConfig(model=self.model, temperature=self.temperature, api=self.api, budget=self.budget)


class GateConfig(Config):
    """One paired sequential test per candidate; a candidate is accepted only by it."""

    metric: str = Field(min_length=1, description="key of report.json that candidates are compared by")
    direction: Literal["less", "more"] = Field(description="which values of the metric are better")
    seeds: Annotated[tuple[int, ...], Field(min_length=1)] = Field(
        default=tuple(range(1, 11)), description="seeds, in order; each is run in both arms"
    )
    candidates: Positive = Field(default=5, description="most candidates of the loop")
    level: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        default=0.05, description="chance that a loop without any true improvement accepts one"
    )
    budget: Literal["tokens", "wall"] = Field(
        default="tokens", description="what both arms of a pair spend equally: tokens, or wall-clock seconds"
    )
    wall_tolerance: Annotated[float, Field(ge=0, le=0.2)] = Field(
        default=0.02, description="largest relative difference of wall-clock time"
    )

    held_out: PathText | None = Field(
        default=None,
        description="tokens that no search run reads, opened once for the winner; a loop with experiments needs it",
    )

    @property
    def threshold(self) -> float:
        """The e-value from which a candidate is accepted: its share of the level, inverted."""
        return self.candidates / self.level

    @property
    def fewest_seeds(self) -> int:
        """Seeds that a candidate needs when it wins all of them: a seed at most doubles the e-value."""
        return math.ceil(math.log2(self.threshold))

    @model_validator(mode="after")
    def _can_decide(self) -> GateConfig:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError("research.gate.seeds names a seed twice; name each once")
        if len(self.seeds) < self.fewest_seeds:
            raise ValueError(
                f"research.gate.seeds has {len(self.seeds)} seeds; {self.candidates} candidates at level "
                f"{self.level:g} need at least {self.fewest_seeds}; add seeds or allow fewer candidates"
            )
        return self


class LoopBudgetConfig(Config):
    """What a whole loop may spend: writer, reviewer and experiments together. Unset is no limit."""

    max_cost_usd: PositiveFloat | None = Field(default=None, description="US dollars of all requests")
    max_tokens: Positive = Field(default=3_000_000, description="prompt and reply tokens of all requests")
    max_calls: Positive = Field(default=300, description="requests to language models, failed attempts included")
    max_wall_hours: PositiveFloat = Field(default=24.0, description="hours of the loop while it runs")
    max_gpu_hours: PositiveFloat = Field(default=24.0, description="hours of all experiments")


class ResearchLoopConfig(Config):
    """A loop that drafts, reviews, runs proposed experiments under a registered test, and redrafts."""

    max_iterations: Positive = Field(default=5, description="most rounds of draft, review and experiments")
    max_experiments_per_iteration: NonNegativeInt = Field(default=2, description="most experiments of a round")
    max_total_experiments: NonNegativeInt = Field(default=5, description="most experiments of the loop")
    min_score_to_approve: Score = Field(default=7.5, description="score, of 10, from which a paper can be approved")
    auto_approve_score: Score = Field(
        default=9.0, description="score from which minor findings need no further round; it bypasses no gate"
    )
    auto_run_experiments: bool = Field(
        default=False, description="true: proposed experiments run without a person's confirmation"
    )
    save_all_versions: bool = Field(default=True, description="false: only the newest version of the paper is kept")
    experiment_timeout_s: PositiveFloat = Field(
        default=3600.0, description="seconds after which a run counts as failed; reserved before it begins"
    )
    gate: GateConfig | None = Field(default=None, description="the registered test; unset: no experiments")
    budget: LoopBudgetConfig = Field(default=LoopBudgetConfig(), description="what the loop may spend")

    @model_validator(mode="after")
    def _fits(self) -> ResearchLoopConfig:
        if self.auto_approve_score < self.min_score_to_approve:
            raise ValueError("auto_approve_score is below min_score_to_approve; raise it")
        if self.gate is not None and self.max_total_experiments > self.gate.candidates:
            raise ValueError(
                f"max_total_experiments={self.max_total_experiments} is more than research.gate.candidates="
                f"{self.gate.candidates}; lower it or register more"
            )
        return self
