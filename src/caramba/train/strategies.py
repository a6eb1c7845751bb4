"""How Lightning runs a phase: data parallel or sharded over ranks, and precision with loss scaling."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy

from caramba.config.parallel import ParallelConfig
from caramba.config.train import BLOCK_PHASES, PhaseConfig
from caramba.data.checkpoint.folder import latest_sharded_state
from caramba.data.checkpoint.formats import load_sharded_state, save_sharded_state
from caramba.data.checkpoint.network import spec_of
from caramba.errors import CheckpointError
from caramba.optim import MasterWeights
from caramba.runtime import (
    RuntimePlan,
    get_local_world_size,
    get_rank,
    get_world_size,
    is_process_group_up,
    send_from_main,
)


class ScaledPrecision(MixedPrecision):
    """Autocast in float16 with a scaled loss. Gradients are unscaled by the module, before it clips them.

    Lightning's own unscales within the step of an optimiser, and not at all for a fused one, so that gradients would be
    clipped while they are scaled.
    """

    def __init__(self, device: str) -> None:
        super().__init__("16-mixed", device)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: pl.LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        assert self.scaler is not None
        closure()
        self._after_closure(model, optimizer)
        stepped = self.scaler.step(optimizer, **kwargs)
        self.scaler.update()
        return stepped


def precision_arguments(plan: RuntimePlan) -> tuple[Any, list[Any]]:
    """Return the Trainer's `precision`, and the plugins that take its place."""
    mode = plan.value("precision")
    if mode == "16-mixed":
        return None, [ScaledPrecision(plan.value("device"))]
    if mode == "bf16-mixed" and plan.value("device") == "mps":  # Lightning's own would autocast on CUDA
        return None, [MixedPrecision(mode, "mps")]
    # Weights in bfloat16 are the module's work: Lightning's "bf16-true" would make new tensors of losses bfloat16 too.
    return "32-true" if mode == "bf16-true" else mode, []


@contextmanager
def matmul_precision(plan: RuntimePlan) -> Iterator[None]:
    """Compute float32 matrix products in TF32 while a phase trains, if its plan has TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if plan.value("tf32") else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


SINGLE, AVERAGED, SHARDED, STAGED = "single", "averaged", "sharded", "staged"
"""How gradients of a phase come together: on one rank; as means over ranks that hold the same weights; by FSDP2, each
rank its part; or not at all, where every rank is a stage of the model."""


def strategy_for(parallel: ParallelConfig, phase: PhaseConfig) -> str:
    """Return how the gradients of a phase come together on the ranks that are joined.

    Blocks hold so little that they are not sharded.
    """
    if parallel.strategy == "single" or not is_process_group_up():
        return SINGLE
    if parallel.is_sharded and phase.phase not in BLOCK_PHASES:
        return SHARDED
    if get_world_size() == 1:
        return SINGLE
    return STAGED if parallel.strategy == "pipeline" else AVERAGED


def strategy_arguments(parallel: ParallelConfig, way: str, device: torch.device) -> tuple[dict[str, Any], list[Any]]:
    """Return the Trainer's devices, nodes and strategy, and the plugin that tells it who is who."""
    rank_zero_only.rank = get_rank()  # which writes logs; Lightning has read SLURM_PROCID, of whatever step it is
    if way == SINGLE:
        return {"devices": 1, "strategy": InPlaceStrategy(device)}, [JoinedRanks()]
    here = get_local_world_size()
    places = {"devices": here, "num_nodes": get_world_size() // here}
    return {**places, "strategy": _strategy(parallel, way)}, [JoinedRanks()]


def _strategy(parallel: ParallelConfig, way: str) -> Any:
    if way == SHARDED:
        return ShardedStrategy(data_parallel_size=get_world_size() // parallel.tp, tensor_parallel_size=parallel.tp)
    return AveragedStrategy() if way == AVERAGED else BareStrategy()


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
        return is_process_group_up()

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
            if isinstance(optimizer, MasterWeights):
                optimizer.forget()
            optimizer.state.clear()
        self.optimizers, self.lr_scheduler_configs = [], []
        if self.lightning_module is not None:
            self.lightning_module.zero_grad(set_to_none=True)
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


class BareStrategy(DDPStrategy):
    """Several ranks without torch's DDP around the module."""

    def configure_ddp(self) -> None:
        """Leave the module as it is."""


class AveragedStrategy(BareStrategy):
    """Ranks that hold the same weights; a callback has their gradients averaged."""

    def configure_ddp(self) -> None:
        """Begin with rank 0's weights, before the optimiser takes its masters from them."""
        module: Any = self.lightning_module
        send_from_main([*module.model.parameters(), *module.model.buffers()])


class ShardedStrategy(ModelParallelStrategy):
    """FSDP2 as the module configures it; states are written and read by all ranks, whole or not at all."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # written as it is, by every rank its part

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        model, optimizer = self._trained()
        loop = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
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
            raise CheckpointError(f"{checkpoint_path}: holds no whole state; remove it to begin the phase again")
        return load_sharded_state(place, *self._trained())

    def _trained(self) -> tuple[Any, torch.optim.Optimizer]:
        module: Any = self.lightning_module
        return module.model, self.optimizers[0]
