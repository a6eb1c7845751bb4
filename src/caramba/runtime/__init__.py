"""Facts of the machine and the plan that follows from them."""

from caramba.runtime.agreement import Agreement
from caramba.runtime.determinism import apply_determinism, seed_process
from caramba.runtime.device import choose_device, device_facts, synchronize
from caramba.runtime.distributed import (
    get_rank,
    get_world_size,
    is_distributed,
    is_main_process,
    refuse_unconnected_ranks,
)
from caramba.runtime.memory import MemoryMeter, address_limit, free_bytes, is_out_of_memory, release_memory
from caramba.runtime.offload import activations_on_host
from caramba.runtime.plan import Decision, RuntimePlan, apply_threads, load_plan, plan, save_plan
from caramba.runtime.plan_cache import cached_plan, plan_path, signature_of, store_plan
from caramba.runtime.precision import Precision, choose_precision, device_precisions
from caramba.runtime.tuned import AttentionChoice, choose_attention, families_of

__all__ = [
    "Agreement",
    "AttentionChoice",
    "Decision",
    "MemoryMeter",
    "Precision",
    "RuntimePlan",
    "activations_on_host",
    "address_limit",
    "apply_determinism",
    "apply_threads",
    "cached_plan",
    "choose_attention",
    "choose_device",
    "choose_precision",
    "device_facts",
    "device_precisions",
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
    "seed_process",
    "signature_of",
    "store_plan",
    "synchronize",
]
