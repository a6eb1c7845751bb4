"""Facts of the machine and the plan that follows from them."""

from caramba.runtime.determinism import apply_determinism, seed_process
from caramba.runtime.device import choose_device, device_facts, synchronize
from caramba.runtime.distributed import (
    get_rank,
    get_world_size,
    is_distributed,
    is_main_process,
    refuse_unconnected_ranks,
)
from caramba.runtime.offload import activations_on_host
from caramba.runtime.plan import Decision, RuntimePlan, apply_threads, load_plan, plan, save_plan
from caramba.runtime.precision import Precision, choose_precision, device_precisions
from caramba.runtime.tuned import AttentionChoice, choose_attention, families_of

__all__ = [
    "AttentionChoice",
    "Decision",
    "Precision",
    "RuntimePlan",
    "activations_on_host",
    "apply_determinism",
    "apply_threads",
    "choose_attention",
    "choose_device",
    "choose_precision",
    "device_facts",
    "device_precisions",
    "families_of",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "load_plan",
    "plan",
    "refuse_unconnected_ranks",
    "save_plan",
    "seed_process",
    "synchronize",
]
