"""Papers: a language model drafts LaTeX in which numbers, citations and figures are named, and code puts them in."""

from __future__ import annotations

from caramba.config.paper import PaperConfig
from caramba.paper.drafter import PaperDrafter

__all__ = ["PaperConfig", "PaperDrafter"]
