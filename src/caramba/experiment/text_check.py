"""Warnings, before training, of text from which no good student of a pretrained teacher can be expected."""

from __future__ import annotations

import math
from pathlib import Path

from caramba.config.hf import is_hf_folder
from caramba.console import logger
from caramba.evaluation.perplexity import count_predicted_bytes
from caramba.experiment.session import Session
from caramba.experiment.surgery import TRANSPLANT
from caramba.infer.nll import windowed_nll

MOST_EPOCHS = 4.0
"""Passes over the text beyond which training repeats what it knows (Muennighoff et al., 2023, arXiv:2305.16264)."""
FOREIGN_BITS = 1.8
"""Bits a byte of a teacher's own loss, above which the text is hardly what it was trained on: English is near 1."""
WINDOWS = 8


def check_text(session: Session) -> None:
    """Warn where a Hugging Face teacher meets too little text, text of another kind, or ids of unknown meaning."""
    teacher = session.manifest.model.teacher
    if teacher is None or teacher.checkpoint is None or TRANSPLANT in session.ledger:
        return
    folder = Path(teacher.checkpoint).expanduser()
    if not is_hf_folder(folder):
        return
    if not (folder / "tokenizer.json").is_file():
        logger.warning(
            f"{folder} has no tokenizer.json: whether the ids of {session.corpus.name} are the teacher's is not known; "
            "put its tokenizer.json there and prepare the text with it (caramba prepare text PATH --tokenizer FOLDER)"
        )
    _check_amount(session)
    _check_kind(session)


def _check_amount(session: Session) -> None:
    phases = [phase for run, phase in session.group.trained if run.id not in session.ledger]
    asked = sum(phase.tokens for phase in phases if phase.trains == "student" and phase.batch_size != "auto")
    asked *= session.data_ranks
    there = int(session.corpus.train.size)
    if asked > MOST_EPOCHS * there:
        logger.warning(
            f"the phases read {asked:,} tokens, {asked / there:.1f} times the {there:,} of train: what repeats that "
            "often is learned by heart; prepare more text, let the teacher write it (caramba prepare sample), or train "
            "fewer steps"
        )


def _check_kind(session: Session) -> None:
    """Measure the teacher on a few held-out windows, as long as those of the first phase."""
    sizes = [phase.block_size for _, phase in session.group.trained]
    token_bytes = session.corpus.token_bytes
    if not sizes or token_bytes is None:
        return
    windows = session.windows("val", sizes[0])
    found = windowed_nll(session.model_of("teacher"), windows, windows=WINDOWS, batch_size=1, device=session.device)
    size = count_predicted_bytes(windows, WINDOWS, token_bytes)
    bits = found.total / math.log(2) / size if size else 0.0
    if bits > FOREIGN_BITS:
        logger.warning(
            f"the teacher's own loss on {session.corpus.name} is {bits:.2f} bits a byte in windows of {sizes[0]} "
            "tokens, where text like that of its training has about 1: use text of its language and kind, or let it "
            "write its own (caramba prepare sample)"
        )
