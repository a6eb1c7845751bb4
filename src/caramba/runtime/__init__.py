"""Facts of the machine and the plan that follows from them."""

from caramba.runtime.device import choose_device, device_facts, prefers_cudnn, synchronize
from caramba.runtime.distributed import get_rank, get_world_size, is_distributed, is_main_process
from caramba.runtime.plan import Decision, RuntimePlan, apply_threads, load_plan, plan, save_plan

__all__ = [
    "Decision",
    "RuntimePlan",
    "apply_threads",
    "choose_device",
    "device_facts",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "load_plan",
    "plan",
    "prefers_cudnn",
    "save_plan",
    "synchronize",
]
