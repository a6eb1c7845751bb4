"""The last step of a run whose manifest has a `paper` section: a draft from its artifacts."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path

from caramba.artifacts.write import REPORT_FILE
from caramba.config.manifest import Manifest
from caramba.console import logger
from caramba.errors import AgentError, BudgetExceeded, CarambaError
from caramba.runs.events import append_event
from caramba.runs.files import sha256_of


def draft_paper(manifest: Manifest, group: str, run_dir: Path, folder: Path) -> None:
    """Draft a paper in `folder/paper/`, or resume the one there, unless it is of these artifacts already.

    Raises:
        AgentError, BudgetExceeded: no version could be made. The run itself is finished then, its result written.
    """
    config = manifest.paper
    if config is None or not config.enabled:
        return
    from caramba.paper import PaperDrafter
    from caramba.paper.folder import PaperFolder

    name = group if folder != run_dir else None
    try:
        head = PaperFolder(folder / "paper").head()
        if head is not None and head.get("report_sha256") == sha256_of(folder / "artifacts" / REPORT_FILE):
            logger.info(f"paper: version {head['version']} is of these artifacts")
            return
        drafted = PaperDrafter(config).draft_sync(run_dir, update=True, group=name)
    except CarambaError as error:
        kind = type(error) if isinstance(error, AgentError | BudgetExceeded) else AgentError
        words = ["caramba", "paper", str(run_dir), *(["--group", name] if name else []), "--update"]
        raise kind(
            f"paper: {error}\nThe run is finished and its artifacts are written; to draft again: {shlex.join(words)}"
        ) from None
    append_event(folder, "paper_adopted", version=drafted.version, **dataclasses.asdict(drafted.spent))
    logger.path(str(drafted.pdf), "paper")
