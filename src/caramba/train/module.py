"""The LightningModule around any topology-built model: it drives an Objective and owns the optimiser step."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.aggregation import RunningMean

from caramba.config.train import PhaseConfig
from caramba.data import IGNORED
from caramba.distill import Batch, Objective
from caramba.errors import CarambaError
from caramba.optim import WeightAverage, build_optimizer, clip_gradients, learning_rate


class CarambaModule(pl.LightningModule):
    """One phase of training. Optimisation is manual, because a blockwise step runs one backward per block.

    Only the trained model is a submodule: a teacher is neither saved nor moved nor seen by the optimiser. Gradients of
    `gradient_accumulation_steps` micro-batches are averaged, clipped by the norm of each of the objective's groups,
    then stepped. `has_converged` ends the phase before its last step.
    """

    def __init__(self, objective: Objective, phase: PhaseConfig, *, log_every: int = 10) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = objective.model
        self.objective = objective
        self.phase = phase
        self.log_every = log_every
        self.micro_steps = 0
        self.trained_steps = 0  # by this module; what memory held when it ran out
        self.is_stepping = False
        self.average: WeightAverage | None = None
        self.train_loss = RunningMean(window=50, nan_strategy="disable")
        self.val_loss = MeanMetric(nan_strategy="disable")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = self.objective.trainable()
        chosen = {id(parameter) for _, parameter in trained}
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        if self.phase.ema_decay is not None:
            self.average = WeightAverage(trained, self.phase.ema_decay)
        return build_optimizer(trained, self.phase)

    @property
    def has_converged(self) -> bool:
        """Whether the objective has nothing left to train, before the last step."""
        return self.objective.is_done

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        losses = self.objective.step(batch, self._backward)
        self.micro_steps += 1
        self.train_loss.update(losses["loss"])
        if self.micro_steps == self.phase.gradient_accumulation_steps:
            self.micro_steps = 0
            losses["grad_norm"] = self._step()
            self.objective.advance(losses)
        return losses

    def _backward(self, loss: Tensor) -> None:
        self.manual_backward(loss / self.phase.gradient_accumulation_steps)

    def _step(self) -> Tensor:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        rate = learning_rate(self.phase, *self.objective.schedule_span(self.global_step, self.phase.steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        norm = clip_gradients(self.objective.clip_groups(), self.phase.max_grad_norm)
        self.is_stepping = True
        optimizer.step()
        self.is_stepping = False
        self.trained_steps += 1
        optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update()
        return norm

    def finish(self) -> None:
        """Turn the trained weights into those that are saved: their average if one is kept, merged and gathered."""
        if self.average is not None:
            self.average.copy_to_weights()
        self.objective.finish()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        counted = (batch[1] != IGNORED).sum()
        self.val_loss.update(self.objective.evaluate(batch)["loss"], weight=counted)

    def on_validation_epoch_end(self) -> None:
        self.record({"val_loss": float(self.val_loss.compute())})
        self.val_loss.reset()

    def running_loss(self) -> float:
        """Return the mean loss of the last 50 micro-batches, over all ranks."""
        return float(self.train_loss.compute())

    def refuse_divergence(self) -> None:
        """Raise when a weight is not finite, so that nothing worthless is saved over something good.

        Raises:
            CarambaError: training has diverged.
        """
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                raise CarambaError(
                    f"{self.phase.phase}: {name} is not finite at step {self.global_step}: training has diverged; "
                    f"lower lr (now {self.phase.lr}), lengthen warmup_steps, or lower max_grad_norm"
                )

    def record(self, values: dict[str, float]) -> None:
        """Send one row of metrics to every logger under the current optimiser step.

        Lightning's own `self.log` would repeat the last values at every step between two rows.
        """
        for logger in self.loggers:
            logger.log_metrics(values, step=self.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Random state is taken at the end of a batch and put back before the next, so that dropout goes on as it was.
        state: dict[str, Any] = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        checkpoint["rng"] = state
        if self.average is not None:
            checkpoint["average"] = self.average.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._rng: dict[str, Any] | None = checkpoint["rng"]
        self._average_state: dict[str, Any] | None = checkpoint.get("average")

    def on_train_start(self) -> None:
        state, self._average_state = getattr(self, "_average_state", None), None
        if (
            state is not None and self.average is not None
        ):  # made by configure_optimizers, after the state was read
            self.average.load_state_dict(state)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        rng, self._rng = getattr(self, "_rng", None), None
        if rng is not None:
            torch.set_rng_state(rng["cpu"])
            if "cuda" in rng and torch.cuda.is_available():
                torch.cuda.set_rng_state_all(rng["cuda"])
