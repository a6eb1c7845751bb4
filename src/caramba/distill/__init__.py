"""Objectives, block schedule and teacher targets; nothing here knows Lightning."""

from caramba.distill.blockwise import BlockwiseObjective, block_errors, relative_l1, tap_blocks
from caramba.distill.objective import (
    Backward,
    Batch,
    LanguageModelObjective,
    Objective,
    TeacherKLObjective,
    cross_entropy,
    teacher_kl,
)
from caramba.distill.schedule import BlockSchedule

__all__ = [
    "Backward",
    "Batch",
    "BlockSchedule",
    "BlockwiseObjective",
    "LanguageModelObjective",
    "Objective",
    "TeacherKLObjective",
    "block_errors",
    "cross_entropy",
    "relative_l1",
    "tap_blocks",
    "teacher_kl",
]
