"""Facts of the machine and the plan that follows from them."""

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.runtime.device import MemoryMeter as MemoryMeter
    from caramba.runtime.device import activations_on_host as activations_on_host
    from caramba.runtime.device import address_limit as address_limit
    from caramba.runtime.device import apply_determinism as apply_determinism
    from caramba.runtime.device import check_gpu as check_gpu
    from caramba.runtime.device import choose_device as choose_device
    from caramba.runtime.device import choose_precision as choose_precision
    from caramba.runtime.device import device_facts as device_facts
    from caramba.runtime.device import free_bytes as free_bytes
    from caramba.runtime.device import is_out_of_memory as is_out_of_memory
    from caramba.runtime.device import random_states as random_states
    from caramba.runtime.device import release_memory as release_memory
    from caramba.runtime.device import restore_random_states as restore_random_states
    from caramba.runtime.device import seed_process as seed_process
    from caramba.runtime.device import synchronize as synchronize
    from caramba.runtime.distributed import Ranks as Ranks
    from caramba.runtime.distributed import SignalAgreement as SignalAgreement
    from caramba.runtime.distributed import all_agree as all_agree
    from caramba.runtime.distributed import check_world as check_world
    from caramba.runtime.distributed import data_share as data_share
    from caramba.runtime.distributed import gather_objects as gather_objects
    from caramba.runtime.distributed import gather_on_main as gather_on_main
    from caramba.runtime.distributed import get_local_world_size as get_local_world_size
    from caramba.runtime.distributed import get_rank as get_rank
    from caramba.runtime.distributed import get_world_size as get_world_size
    from caramba.runtime.distributed import is_distributed as is_distributed
    from caramba.runtime.distributed import is_main_process as is_main_process
    from caramba.runtime.distributed import is_process_group_up as is_process_group_up
    from caramba.runtime.distributed import join_ranks as join_ranks
    from caramba.runtime.distributed import mean_over_ranks as mean_over_ranks
    from caramba.runtime.distributed import merge_over_ranks as merge_over_ranks
    from caramba.runtime.distributed import send_from_main as send_from_main
    from caramba.runtime.gradient_average import EmbeddingGradRows as EmbeddingGradRows
    from caramba.runtime.gradient_average import GradientAverage as GradientAverage
    from caramba.runtime.gradient_average import takes_rows as takes_rows
    from caramba.runtime.runtime_plan import Decision as Decision
    from caramba.runtime.runtime_plan import RuntimePlan as RuntimePlan
    from caramba.runtime.runtime_plan import apply_threads as apply_threads
    from caramba.runtime.runtime_plan import cached_plan as cached_plan
    from caramba.runtime.runtime_plan import load_plan as load_plan
    from caramba.runtime.runtime_plan import plan as plan
    from caramba.runtime.runtime_plan import plan_path as plan_path
    from caramba.runtime.runtime_plan import read_valid_plans as read_valid_plans
    from caramba.runtime.runtime_plan import save_plan as save_plan
    from caramba.runtime.runtime_plan import signature_of as signature_of
    from caramba.runtime.runtime_plan import store_plan as store_plan
    from caramba.runtime.runtime_plan import trainable_decision as trainable_decision
    from caramba.runtime.tuned import AttentionChoice as AttentionChoice
    from caramba.runtime.tuned import choose_attention as choose_attention
    from caramba.runtime.tuned import families_of as families_of

__getattr__ = lazy_exports(__name__, __file__)
