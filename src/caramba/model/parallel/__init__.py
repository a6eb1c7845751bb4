"""Splits a model over ranks: its layers (tensor parallelism of one dimension), or its stack (stages)."""

from caramba.model.parallel.local import full_state_dict, keep_local
from caramba.model.parallel.plan import apply_tensor_parallel, tensor_parallel_plan
from caramba.model.parallel.stages import Stage, gather_stages, send_stages, split_stage

__all__ = [
    "Stage",
    "apply_tensor_parallel",
    "full_state_dict",
    "gather_stages",
    "keep_local",
    "send_stages",
    "split_stage",
    "tensor_parallel_plan",
]
