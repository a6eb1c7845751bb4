"""What the tests of the drafter share: a script of two sections, and a draft of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.paper_servers import Answer, calls

from caramba.config.paper import PaperConfig
from caramba.paper import PaperDrafter
from caramba.paper.drafter import Drafted

ABSTRACT = "We shrink the cache of a teacher."
RESULTS = r"""The student reaches \result{perplexity.student.perplexity}, its teacher
\result{perplexity.teacher.perplexity}: \derived{ratio}{perplexity.student.perplexity}{perplexity.teacher.perplexity}."""


def section(name: str, body: str) -> dict[str, str]:
    return {"section": name, "body": body}


def whole(results: str = RESULTS) -> Answer:
    """A reply that writes the whole paper."""
    return calls(("write_tex_file", {"sections": {"abstract": ABSTRACT, "results": results}}))


def drafted(config: PaperConfig, run: Path, output_dir: Path | None = None, **named: Any) -> Drafted:
    return PaperDrafter(config, output_dir, sleep=lambda seconds: None).draft_sync(run, **named)
