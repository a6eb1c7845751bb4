"""Splits a model over ranks: its layers (tensor parallelism of one dimension), or its stack (stages)."""

from caramba.model.parallel.plan import apply_tensor_parallel as apply_tensor_parallel
from caramba.model.parallel.plan import tensor_parallel_plan as tensor_parallel_plan
from caramba.model.parallel.stages import Stage as Stage
from caramba.model.parallel.stages import gather_stages as gather_stages
from caramba.model.parallel.stages import send_stages as send_stages
from caramba.model.parallel.stages import split_stage as split_stage
from caramba.model.parallel.styles import full_state_dict as full_state_dict
from caramba.model.parallel.styles import keep_local as keep_local
