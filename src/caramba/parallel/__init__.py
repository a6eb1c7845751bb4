"""Splits a model's layers over ranks: tensor parallelism of one dimension."""

from caramba.parallel.local import full_state_dict, keep_local
from caramba.parallel.plan import apply_tensor_parallel, tensor_parallel_plan

__all__ = ["apply_tensor_parallel", "full_state_dict", "keep_local", "tensor_parallel_plan"]
