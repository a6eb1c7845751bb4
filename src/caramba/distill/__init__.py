"""Objectives, block schedule and teacher targets; nothing here knows Lightning."""

import sys

from caramba import CallablePackage
from caramba.distill.block_loss import attention_kl, relative_l1, sample_queries
from caramba.distill.blockwise import BlockShard, BlockTargets, BlockwiseObjective, block_errors
from caramba.distill.capture import capture_attention_io, replace_attention
from caramba.distill.lora import Lora
from caramba.distill.objective import (
    Backward,
    Batch,
    LanguageModelObjective,
    Objective,
    TeacherLogitsObjective,
)
from caramba.distill.pipelined import PipelinedObjective
from caramba.distill.schedule import BlockSchedule
from caramba.distill.teacher_cache import TeacherCache, refuse_over_cap
from caramba.distill.teacher_rows import TAIL_SAMPLES, TeacherRows, bytes_per_token, n_entries
from caramba.distill.vocabulary import cross_entropy, teacher_kl, vocabulary_losses

__all__ = [
    "TAIL_SAMPLES",
    "Backward",
    "Batch",
    "BlockSchedule",
    "BlockShard",
    "BlockTargets",
    "BlockwiseObjective",
    "LanguageModelObjective",
    "Lora",
    "Objective",
    "PipelinedObjective",
    "TeacherCache",
    "TeacherLogitsObjective",
    "TeacherRows",
    "attention_kl",
    "block_errors",
    "bytes_per_token",
    "capture_attention_io",
    "cross_entropy",
    "n_entries",
    "refuse_over_cap",
    "relative_l1",
    "replace_attention",
    "sample_queries",
    "teacher_kl",
    "vocabulary_losses",
]

sys.modules[__name__].__class__ = CallablePackage
