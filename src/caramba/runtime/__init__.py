"""Facts of the machine and the plan that follows from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.runtime.device import (
        MemoryMeter,
        Precision,
        address_limit,
        apply_determinism,
        check_gpu,
        choose_device,
        choose_precision,
        device_facts,
        device_precisions,
        free_bytes,
        is_out_of_memory,
        random_states,
        release_memory,
        restore_random_states,
        seed_process,
        synchronize,
    )
    from caramba.runtime.distributed import (
        Ranks,
        SignalAgreement,
        all_agree,
        check_world,
        data_share,
        gather_objects,
        gather_on_main,
        get_local_world_size,
        get_rank,
        get_world_size,
        is_distributed,
        is_main_process,
        is_process_group_up,
        join_ranks,
        mean_over_ranks,
        merge_over_ranks,
        send_from_main,
    )
    from caramba.runtime.gradient_average import GradientAverage
    from caramba.runtime.offload import activations_on_host
    from caramba.runtime.runtime_plan import (
        Decision,
        RuntimePlan,
        apply_threads,
        cached_plan,
        load_plan,
        plan,
        plan_path,
        read_valid_plans,
        save_plan,
        signature_of,
        store_plan,
        trainable_decision,
    )
    from caramba.runtime.table_rows import EmbeddingGradRows, takes_rows
    from caramba.runtime.tuned import AttentionChoice, choose_attention, families_of

__all__ = [
    "AttentionChoice",
    "Decision",
    "EmbeddingGradRows",
    "GradientAverage",
    "MemoryMeter",
    "Precision",
    "Ranks",
    "RuntimePlan",
    "SignalAgreement",
    "activations_on_host",
    "address_limit",
    "all_agree",
    "apply_determinism",
    "apply_threads",
    "cached_plan",
    "check_gpu",
    "check_world",
    "choose_attention",
    "choose_device",
    "choose_precision",
    "data_share",
    "device_facts",
    "device_precisions",
    "families_of",
    "free_bytes",
    "gather_objects",
    "gather_on_main",
    "get_local_world_size",
    "get_rank",
    "get_world_size",
    "is_distributed",
    "is_main_process",
    "is_out_of_memory",
    "is_process_group_up",
    "join_ranks",
    "load_plan",
    "mean_over_ranks",
    "merge_over_ranks",
    "plan",
    "plan_path",
    "random_states",
    "read_valid_plans",
    "release_memory",
    "restore_random_states",
    "save_plan",
    "seed_process",
    "send_from_main",
    "signature_of",
    "store_plan",
    "synchronize",
    "takes_rows",
    "trainable_decision",
]

__getattr__ = lazy_exports(__name__, __file__)
