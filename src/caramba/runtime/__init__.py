"""Facts of the machine and the plan that follows from them."""

from caramba.runtime.device import choose_device, device_facts, synchronize
from caramba.runtime.distributed import (
    get_rank,
    get_world_size,
    is_distributed,
    is_main_process,
    refuse_unconnected_ranks,
)
from caramba.runtime.memory import MemoryMeter, address_limit, free_bytes, is_out_of_memory, release_memory
from caramba.runtime.plan import Decision, RuntimePlan, apply_threads, load_plan, plan, save_plan
from caramba.runtime.plan_cache import cached_plan, plan_path, signature_of, store_plan
from caramba.runtime.tuned import AttentionChoice, choose_attention, families_of

__all__ = [
    "AttentionChoice",
    "Decision",
    "MemoryMeter",
    "RuntimePlan",
    "address_limit",
    "apply_threads",
    "cached_plan",
    "choose_attention",
    "choose_device",
    "device_facts",
    "families_of",
    "free_bytes",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "is_out_of_memory",
    "load_plan",
    "plan",
    "plan_path",
    "refuse_unconnected_ranks",
    "release_memory",
    "save_plan",
    "signature_of",
    "store_plan",
    "synchronize",
]
