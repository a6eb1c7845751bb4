"""What of a forward pass is kept for backward, as a phase and as `parallel` say it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator


def checkpointing_word(value: Any) -> Any:
    """Return the word that true and false stand for; what is no such thing comes back as it is."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


Checkpointing = Annotated[Literal["none", "selective", "full", "auto"], BeforeValidator(checkpointing_word)]
"""none keeps all, full the inputs of blocks, selective matrix products and attention; true is full, false none."""
