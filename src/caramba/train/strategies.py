"""How Lightning runs a phase on the ranks that were joined: data parallel, or with sharded weights."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from caramba.checkpoint.sharded import latest_sharded_state, load_sharded_state, save_sharded_state
from caramba.config.parallel import ParallelConfig
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.errors import CheckpointError
from caramba.model import spec_of
from caramba.optim import WideWeights
from caramba.runtime import get_local_world_size, get_rank, get_world_size, is_joined

SINGLE, WRAPPED, AVERAGED, SHARDED, STAGED = "single", "wrapped", "averaged", "sharded", "staged"
"""How gradients of a phase come together: on one rank; by torch's DDP, while backward goes on; by the module, after it;
by FSDP2, each rank its part; or not at all, where every rank is a stage of the model."""


def way_of(parallel: ParallelConfig, phase: PhaseConfig) -> str:
    """Return how the gradients of a phase come together on the ranks that are joined.

    DDP knows one backward a step over parameters that keep their dtype. Blocks have a backward each, and weights in
    bfloat16 are narrowed when the optimiser has its masters: the module averages those. Blocks hold so little that
    they are not sharded.
    """
    if parallel.strategy == "single" or not is_joined():
        return SINGLE
    if parallel.is_sharded and phase.phase not in BLOCK_PHASES:
        return SHARDED
    if get_world_size() == 1:
        return SINGLE
    if parallel.strategy == "pipeline":
        return STAGED
    is_own = phase.phase in BLOCK_PHASES or phase.has_16_bit_weights
    return AVERAGED if is_own else WRAPPED


def strategy_arguments(
    parallel: ParallelConfig, way: str, device: torch.device
) -> tuple[dict[str, Any], list[Any]]:
    """Return the Trainer's devices, nodes and strategy, and the plugin that tells it who is who."""
    rank_zero_only.rank = (
        get_rank()
    )  # which writes logs; Lightning has read SLURM_PROCID, of whatever step it is
    if way == SINGLE:
        return {"devices": 1, "strategy": InPlaceStrategy(device)}, [JoinedRanks()]
    here = get_local_world_size()
    places = {"devices": here, "num_nodes": get_world_size() // here}
    return {**places, "strategy": _strategy(parallel, way)}, [JoinedRanks()]


def _strategy(parallel: ParallelConfig, way: str) -> Any:
    if way == SHARDED:
        return ShardedStrategy(
            data_parallel_size=get_world_size() // parallel.tp, tensor_parallel_size=parallel.tp
        )
    if way in (AVERAGED, STAGED):
        return BareStrategy()
    return WrappedStrategy(
        parallel.reduce_dtype,
        find_unused_parameters=parallel.find_unused_parameters,
        gradient_as_bucket_view=True,
        bucket_cap_mb=parallel.bucket_cap_mb,
        broadcast_buffers=False,  # what there are, rotary frequencies, are the same on all ranks
    )


class JoinedRanks(ClusterEnvironment):
    """The ranks as they have joined, or one process: Lightning starts no process and opens no connection.

    Left to itself it takes any process of a SLURM job for a task of Lightning's own, and refuses `--ntasks`.
    """

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        raise RuntimeError("the ranks have met already")

    @property
    def main_port(self) -> int:
        raise RuntimeError("the ranks have met already")

    @staticmethod
    def detect() -> bool:
        return is_joined()

    def world_size(self) -> int:
        return get_world_size()

    def set_world_size(self, size: int) -> None:
        """The launcher has set it."""

    def global_rank(self) -> int:
        return get_rank()

    def set_global_rank(self, rank: int) -> None:
        """The launcher has set it."""

    def local_rank(self) -> int:
        return get_rank() % get_local_world_size()

    def node_rank(self) -> int:
        return get_rank() // get_local_world_size()


class InPlaceStrategy(SingleDeviceStrategy):
    """One rank, whose model stays where it was trained, and whose optimiser is let go.

    Lightning moves both to the host when training ends or fails: of a 1B model in float32 20 GB, which nothing reads.
    """

    def __init__(self, device: torch.device) -> None:
        has_index = device.type != "cuda" or device.index is not None
        super().__init__(device if has_index else torch.device("cuda", torch.cuda.current_device()))

    def teardown(self) -> None:
        for optimizer in self.optimizers:  # which cycles of references keep alive for a while
            if isinstance(optimizer, WideWeights):
                optimizer.forget()
            optimizer.state.clear()
        self.optimizers, self.lr_scheduler_configs = [], []
        if self.lightning_module is not None:
            self.lightning_module.zero_grad(set_to_none=True)
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


class WrappedStrategy(DDPStrategy):
    """torch's DDP, whose gradients are averaged in float32 or, at half the traffic, in bfloat16, on any device."""

    def __init__(self, reduce_dtype: str, **words: Any) -> None:
        super().__init__(**words)
        self._reduces_narrow = reduce_dtype == "bfloat16"

    def configure_ddp(self) -> None:
        """Wrap the module; Lightning's own way to a hook leaves hooks out on a CPU without a word."""
        super().configure_ddp()
        if self._reduces_narrow:
            assert isinstance(self.model, DistributedDataParallel)
            self.model.register_comm_hook(None, average_in_bfloat16)


def average_in_bfloat16(_, bucket):  # DDP reads annotations, and strings are none of its own
    """Average a bucket of gradients over all ranks in bfloat16; torch's own hook refuses gloo."""
    whole: Tensor = bucket.buffer()
    narrow = torch.empty_like(whole, dtype=torch.bfloat16)
    torch.mul(whole, 1.0 / dist.get_world_size(), out=narrow)  # one pass, rounded once
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: whole.copy_(done.value()[0]))


class BareStrategy(DDPStrategy):
    """Several ranks without a wrapper: the module averages gradients itself, once a step, or is a stage alone."""

    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 as the module configures it; states are written and read by all ranks, whole or not at all."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # written as it is, by every rank its part

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        model, optimizer = self._trained()
        loop = {
            key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")
        }
        labels = {
            "format": "caramba-1",
            "spec": spec_of(model.spec).model_dump_json(),
            "role": "student",
            "labels": json.dumps({}),
        }
        step = int(checkpoint["global_step"])
        save_sharded_state(Path(filepath), model, optimizer, loop, step=step, labels=labels)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        place = latest_sharded_state(Path(checkpoint_path))
        if place is None:
            raise CheckpointError(
                f"{checkpoint_path}: holds no whole state; remove it to begin the phase again"
            )
        return load_sharded_state(place, *self._trained())

    def _trained(self) -> tuple[Any, torch.optim.Optimizer]:
        module: Any = self.lightning_module
        return module.model, self.optimizers[0]


def last_backward(trainer: pl.Trainer, is_last: bool) -> Any:
    """Return a context for a backward: gradients come together in the last one of a step alone."""
    model = trainer.strategy.model
    if isinstance(model, torch.nn.parallel.DistributedDataParallel) and not is_last:
        return model.no_sync()
    return nullcontext()
