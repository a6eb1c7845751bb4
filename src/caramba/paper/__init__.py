"""Papers: a language model drafts LaTeX in which numbers, citations and figures are named, and code puts them in."""

from __future__ import annotations

from caramba.config.paper import PaperConfig, ResearchLoopConfig, ReviewConfig
from caramba.paper.drafter import PaperDrafter
from caramba.paper.research.loop import ResearchLoop
from caramba.paper.reviewer import PaperReviewer

__all__ = [
    "PaperConfig",
    "PaperDrafter",
    "PaperReviewer",
    "ResearchLoop",
    "ResearchLoopConfig",
    "ReviewConfig",
]
