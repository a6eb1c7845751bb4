"""Schema of `review:`: how a language model reviews a paper after the checks by rule."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field

from caramba.config.base import Config
from caramba.config.paper import ApiConfig, BudgetConfig, PaperConfig

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
    check_methodology: bool = Field(
        default=True, description="whether the design of the experiment is reviewed"
    )
    check_experiments: bool = Field(default=True, description="whether missing experiments are reviewed")
    check_results: bool = Field(default=True, description="whether results and claims are reviewed")
    check_writing: bool = Field(default=True, description="whether structure and text are reviewed")
    check_citations: bool = Field(default=True, description="whether citations are reviewed")
    min_score_to_approve: Score = Field(
        default=7.0, description="score, of 10, from which a paper can be approved"
    )
    auto_generate_experiments: bool = Field(
        default=True, description="whether the reviewer may propose experiments"
    )
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
