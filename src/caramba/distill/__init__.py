"""Objectives, block schedule and teacher targets; nothing here knows Lightning."""

import sys

from caramba import CallablePackage
from caramba.distill.block_loss import attention_kl as attention_kl
from caramba.distill.block_loss import relative_l1 as relative_l1
from caramba.distill.block_loss import sample_queries as sample_queries
from caramba.distill.blockwise import BlockShard as BlockShard
from caramba.distill.blockwise import BlockwiseObjective as BlockwiseObjective
from caramba.distill.blockwise import block_errors as block_errors
from caramba.distill.blockwise import capture_attention_io as capture_attention_io
from caramba.distill.lora import Lora as Lora
from caramba.distill.objective import Backward as Backward
from caramba.distill.objective import Batch as Batch
from caramba.distill.objective import LanguageModelObjective as LanguageModelObjective
from caramba.distill.objective import Objective as Objective
from caramba.distill.objective import TeacherLogitsObjective as TeacherLogitsObjective
from caramba.distill.pipelined import PipelinedObjective as PipelinedObjective
from caramba.distill.schedule import BlockSchedule as BlockSchedule
from caramba.distill.teacher_cache import TeacherCache as TeacherCache
from caramba.distill.teacher_cache import refuse_over_cap as refuse_over_cap
from caramba.distill.teacher_rows import TAIL_SAMPLES as TAIL_SAMPLES
from caramba.distill.teacher_rows import TeacherRows as TeacherRows
from caramba.distill.teacher_rows import bytes_per_token as bytes_per_token
from caramba.distill.teacher_rows import n_entries as n_entries
from caramba.distill.vocabulary import cross_entropy as cross_entropy
from caramba.distill.vocabulary import teacher_kl as teacher_kl
from caramba.distill.vocabulary import vocabulary_losses as vocabulary_losses

sys.modules[__name__].__class__ = CallablePackage
