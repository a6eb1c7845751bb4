"""Training objectives: an objective defines the losses and the weights they train; Lightning runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from caramba.model import Model
from caramba.model.topology import Granularity, checkpoint_topology

Batch = tuple[Tensor, ...]
"""x and y [B, T] int64, with IGNORED in y at masked tokens; then document ids [B, T] if documents are masked, and
sample indices [B] if a phase caches the teacher's outputs."""
Backward = Callable[[Tensor], None]


class Objective(ABC):
    """One step of training: call `backward` on one or more scalar losses, return detached scalars with a `loss`."""

    model: Model
    is_sharded = False
    """Whether weight sharding hooks the nodes of the model's blocks."""

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
        """Sum gradients of one weight over ranks, before clipping. Called once a step on every rank."""

    def replicated_params(self) -> list[Tensor]:
        """Return local parameters that another rank also has and counts in norms."""
        return []

    def schedule_span(self, step: int, steps: int) -> tuple[int, int]:
        """Return (step, steps) of the learning-rate schedule at optimiser step `step` of `steps`."""
        return step, steps

    def at(self, step: int, steps: int) -> None:  # noqa: B027 - most losses are the same at every step
        """Announce optimiser step `step` of `steps`, before its first batch."""

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
        """Trade memory for work from now on; `none` ends it. See `caramba.model.topology.checkpoint_topology`.

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
