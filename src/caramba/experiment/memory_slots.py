"""Another number of memory slots at the start of a phase."""

from __future__ import annotations

import torch

from caramba.config.train import PhaseConfig
from caramba.console import logger
from caramba.data import spread_windows
from caramba.experiment.session import Session
from caramba.model import Model

WINDOWS = 8
"""Windows of training text, spread over it, in which it is measured what is read of the slots."""


def resize_slots(session: Session, phase: PhaseConfig, model: Model) -> None:
    """Resize a model's memory slots by `train.memory_resize`; its optimiser is made after it.

    The same weights, text and seed give the same slots, so that a phase that resumes resizes as before. Checkpoints of
    earlier phases stay as they are.
    """
    resize = phase.memory_resize
    assert resize is not None
    windows = session.training_windows(phase)
    tokens = torch.stack([windows[index][0] for index in spread_windows(len(windows), WINDOWS)])
    model.eval().to(session.device)
    stats = model.get_memory_stats(tokens.to(session.device))
    model.resize_memory(resize.slots, is_open=resize.open)
    logger.info(
        f"memory slots: {resize.slots} from here on; before, of their number {stats['utilization']:.0%} were in use "
        f"and {stats['dead_share']:.0%} dead"
    )
