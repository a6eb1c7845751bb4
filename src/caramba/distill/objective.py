"""What a phase minimises. An objective owns its losses and which weights they train; Lightning only drives it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from caramba.model import Model
from caramba.topology import Granularity, checkpoint_topology

Batch = tuple[Tensor, ...]
"""x and y [B, T] int64, y being IGNORED where nothing counts; then document ids [B, T] where documents are kept apart,
and the samples' indices [B] where a phase keeps the teacher's outputs."""
Backward = Callable[[Tensor], None]


class Objective(ABC):
    """One step of training: call `backward` on one or more scalar losses, return detached scalars with a `loss`."""

    model: Model
    is_sharded = False
    """Whether what shards the model over ranks hooks the nodes of its blocks."""

    @abstractmethod
    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the named parameters of `model` that this objective trains."""

    @abstractmethod
    def step(self, batch: Batch, backward: Backward) -> dict[str, Tensor]:
        """Run forward and backward on x, y [B, T] int64."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> dict[str, Tensor]:
        """Return the same scalars as `step` without gradients."""

    def clip_groups(self) -> list[list[nn.Parameter]]:
        """Return sets of parameters; each set's gradients are clipped by the norm of that set."""
        return [[parameter for _, parameter in self.trainable()]]

    def join_gradients(self) -> None:  # noqa: B027 - most objectives have all gradients of a weight in one place
        """Bring together, before clipping, what several ranks have for one weight. Called once a step on every rank."""

    def replicated_params(self) -> list[Tensor]:
        """Return parameters here that are another rank's too, which counts them in norms."""
        return []

    def schedule_span(self, step: int, steps: int) -> tuple[int, int]:
        """Return (step, steps) of the learning-rate schedule at optimiser step `step` of `steps`."""
        return step, steps

    def at(self, step: int, steps: int) -> None:  # noqa: B027 - most losses are the same at every step
        """Say that optimiser step `step` of `steps` comes next, before its first batch."""

    def advance(self, losses: Mapping[str, Tensor]) -> None:  # noqa: B027 - most objectives keep no count
        """Count one optimiser step that ended with the scalars `losses`."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to train before the phase's last step."""
        return False

    def compilable(self) -> list[nn.Module]:
        """Return the modules whose forward torch.compile may replace while this objective trains.

        The model may run otherwise from then on, with the same numbers, until `checkpoint("none")`.
        """
        return []

    def checkpoint(self, mode: str, granularity: Granularity = "block") -> None:
        """Trade memory for work from now on; `none` ends it. See `caramba.topology.checkpoint_topology`.

        Without effect where `holds_one_block`.
        """
        if not self.holds_one_block:
            checkpoint_topology(self.model.topology, mode, granularity)

    @property
    def holds_one_block(self) -> bool:
        """Whether a step never holds the graph of more than one block, so that there is nothing to checkpoint."""
        return False

    def finish(self) -> None:  # noqa: B027 - most objectives have nothing to do
        """Leave in `model` the plain weights that are saved. Called once, after the last step."""
