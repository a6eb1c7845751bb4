"""Splits a model over ranks: its layers (tensor parallelism of one dimension), or its stack (stages)."""

from caramba.parallel.local import full_state_dict, keep_local
from caramba.parallel.plan import apply_tensor_parallel, tensor_parallel_plan
from caramba.parallel.stages import Stage, gather_stages, send_stages, split_stage

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
