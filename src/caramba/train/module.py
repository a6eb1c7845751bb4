"""The LightningModule around any topology-built model: it drives an Objective and owns the optimiser step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torchmetrics import MeanMetric

from caramba.config.optimizer import AdaGCConfig
from caramba.config.train import PhaseConfig
from caramba.data import IGNORED, samples_of
from caramba.distill import Batch, BlockwiseObjective, Objective
from caramba.errors import CarambaError, CheckpointError, ExtensionFailedError
from caramba.model.sharding import reshard
from caramba.optim import (
    LR_MULT,
    AdaGC,
    MasterWeights,
    NonFiniteWatch,
    WeightAverage,
    build_optimizer,
    clip_gradients,
    clip_values,
    clipping_step,
    learning_rate,
    local,
)
from caramba.runtime import (
    GradientAverage,
    activations_on_host,
    all_agree,
    gather_on_main,
    get_rank,
    get_world_size,
    mean_over_ranks,
    random_states,
    restore_random_states,
)
from caramba.train.strategies import SHARDED, SINGLE, STAGED
from caramba.train.throughput import RunningLoss

KEPT = ("average", "adagc")
"""What the module makes with its optimiser and keeps with the training state."""
OF_RANK, OF_BLOCKS = ("rng", "running_loss"), ("optimizer_states", "callbacks", "adagc", "average")
OF_STAGE = ("state_dict", *OF_BLOCKS)
"""What every rank has of its own: always, where each trains its own blocks, and where each is a stage."""


class CarambaModule(pl.LightningModule):
    """One phase of training. Optimisation is manual, because a blockwise step runs one backward per block.

    Only the trained model is a submodule: a teacher is neither saved nor moved nor seen by the optimiser. Gradients of
    `gradient_accumulation_steps` micro-batches are averaged, clipped, by the norm of each of the objective's groups if
    nothing else is asked for, then stepped if `watch` allows it. `has_converged` ends the phase before its last step.
    Weights in bfloat16 are that from the first step to the last.

    Args:
        targets_of: returns the mean targets per micro-batch of an optimiser step, over all of its
            micro-batches and ranks, where these differ: each then weighs as its targets do, so that a step is that of
            one large batch. None where all have the same, or count alike.
    """

    def __init__(
        self,
        objective: Objective,
        phase: PhaseConfig,
        watch: NonFiniteWatch,
        *,
        log_every: int = 10,
        way: str = SINGLE,
        shard: Callable[[], None] | None = None,
        targets_of: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model = objective.model
        self.objective = objective
        self.phase = phase
        self.watch = watch
        self.log_every = log_every
        self.way, self.shard, self.targets_of = way, shard, targets_of
        self._schedule: Callable[[int, int], float] | None = None  # of a plugin
        self.micro_steps = 0
        self.trained_steps = 0  # by this module, for the report of an out-of-memory error
        self.is_stepping = False
        self.rate = 0.0  # the learning rate of the last step, before multiples of `lr_mult`
        self.averaging: GradientAverage | None = None  # of several ranks that hold the same weights
        self.average: WeightAverage | None = None
        self.adagc: AdaGC | None = None
        self.guard: Any = None  # of an orchestrated phase: answers spikes before a step is taken
        self._sums: dict[str, Tensor] = {}  # of the micro-batches of the current step
        self.train_loss = RunningLoss()
        self.held_out: float | None = None  # loss of the last validation
        self.val_loss = MeanMetric(nan_strategy=math.nan)  # stays to be seen; "disable" would drop the weights

    def configure_model(self) -> None:
        # Before any strategy looks at what takes gradients, and called again by some of Lightning's hooks.
        shard, self.shard = self.shard, None
        if shard is not None:
            shard()
        chosen = {id(parameter) for _, parameter in self.objective.trainable()}
        for parameter in self.model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = self.objective.trainable()
        if self.phase.ema_decay is not None:
            self.average = WeightAverage(trained, self.phase.ema_decay)
        if self.phase.gradient_clip_algorithm == "adagc":
            settings = self.phase.adagc or AdaGCConfig()
            self.adagc = AdaGC(
                [parameter for _, parameter in trained],
                max_norm=self.phase.max_grad_norm,
                **settings.model_dump(),
            )
        optimizer = build_optimizer(trained, self.phase)  # takes its masters from float32 weights
        if self.phase.orchestrator_enabled:
            from caramba.optim.portfolio import build_strategy_clip

            self.adagc = build_strategy_clip(optimizer, [parameter for _, parameter in trained])
        if self.phase.has_16_bit_weights:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        return optimizer

    @property
    def has_converged(self) -> bool:
        """Whether the objective has nothing left to train, before the last step."""
        return self.objective.is_done

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move all but the samples' indices, by which files are read: the host would wait for them."""
        samples = samples_of(batch)
        parts = [part for part in batch if part is not samples]
        moved = super().transfer_batch_to_device(parts, device, dataloader_idx)
        return moved if samples is None else [*moved, samples]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        self.objective.at(self.global_step, self.phase.steps)
        if self.averaging is not None and self.micro_steps + 1 == self.phase.gradient_accumulation_steps:
            self.averaging.expect(batch[0].numel())
        weight = self._weight(batch)
        with self._offload():
            losses = self.objective.step(batch, partial(self._backward, weight))
        self.micro_steps += 1
        self._add(losses, weight)
        if self.micro_steps == self.phase.gradient_accumulation_steps:
            self.micro_steps = 0
            losses, self._sums = self._sums, {}
            if self.phase.gradient_accumulation_steps > 1:
                losses = {key: value / self.phase.gradient_accumulation_steps for key, value in losses.items()}
            # Before anything else goes between ranks: one that has left weights out has begun fewer exchanges by now.
            if self.averaging is not None:
                self.averaging.finish()
            # So that every rank decides alike, on what steps and on what has converged.
            if not self.shares_blocks:
                losses = mean_over_ranks(losses)
            self.train_loss.add(losses["loss"])
            losses["grad_norm"] = self._step(losses["loss"])
            if self.phase.nonfinite == "skip":
                losses["skipped_steps"] = torch.tensor(float(self.watch.skipped))
            self.objective.advance(losses)
        return losses

    @property
    def shares_blocks(self) -> bool:
        """Whether every rank trains blocks of its own, and has gradients and losses of these alone."""
        return isinstance(self.objective, BlockwiseObjective) and self.objective.shard.is_shared

    @property
    def has_stages(self) -> bool:
        """Whether every rank is a stage of the model, and has weights and gradients of its own blocks alone."""
        return self.way == STAGED

    @property
    def _own_keys(self) -> tuple[str, ...]:
        """Entries of a state that every rank has of its own."""
        return (*OF_RANK, *(OF_STAGE if self.has_stages else ()), *(OF_BLOCKS if self.shares_blocks else ()))

    def _offload(self) -> contextlib.AbstractContextManager[Any]:
        if not self.phase.activation_offload:
            return contextlib.nullcontext()
        return activations_on_host(self.model.parameters())

    def _weight(self, batch: Batch) -> Tensor | None:
        """Return what the mean over a micro-batch's targets counts in that of its step [], None for 1: its share of the
        step's targets, times the number of micro-batches."""
        if self.targets_of is None:
            return None
        return (batch[1] != IGNORED).sum() / self.targets_of(self.global_step)

    def _backward(self, weight: Tensor | None, loss: Tensor) -> None:
        weighed = loss if weight is None else loss * weight
        self.manual_backward(weighed / self.phase.gradient_accumulation_steps)

    def _add(self, losses: dict[str, Tensor], weight: Tensor | None) -> None:
        """Add the scalars of a micro-batch to those of its step; what a CUDA graph writes over is copied by that."""
        if weight is not None:
            losses = {key: value * weight for key, value in losses.items()}
        if self.phase.gradient_accumulation_steps > 1:
            sums = self._sums
            losses = {key: sums[key] + value if key in sums else value.clone() for key, value in losses.items()}
        self._sums = losses

    def _learning_rate(self, step: int, steps: int) -> float:
        if isinstance(self.phase.scheduler, str):
            return learning_rate(self.phase, step, steps)
        schedule = self._schedule
        if schedule is None:
            from caramba.config.extension import build_extension

            schedule = self._schedule = build_extension(self.phase.scheduler, self.phase.scheduler)
        assert schedule is not None
        factor = float(schedule(step, steps))
        if not math.isfinite(factor) or factor < 0:
            raise ExtensionFailedError(
                f"train.scheduler ({self.phase.scheduler.type}) returned {factor} at step {step}; expected a factor of "
                "lr from 0"
            )
        assert isinstance(self.phase.lr, float)
        return self.phase.lr * factor

    def _step(self, loss: Tensor) -> Tensor:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        self.rate = self._learning_rate(*self.objective.schedule_span(self.global_step, self.phase.steps))
        for group in optimizer.param_groups:
            group["lr"] = self.rate * group.get(LR_MULT, 1.0)
        self.objective.join_gradients()
        scaler = self._scaler
        if scaler is not None:
            scaler.unscale_(optimizer.optimizer)
        norm, step = self._clip(optimizer.optimizer), self.global_step
        is_taken = not self._overflows(loss, norm) and self.watch.allows(step, loss, norm)
        if self.guard is not None and is_taken:
            is_taken = self.guard.allows(step, loss, norm)
        if not is_taken:  # a weight without a gradient is not touched by any optimiser, and the step counts
            optimizer.zero_grad(set_to_none=True)
        self.is_stepping = True
        optimizer.step()
        self.is_stepping = False
        self.trained_steps += 1
        if self.guard is not None and is_taken:
            self.guard.check_update(step)
        optimizer.zero_grad(set_to_none=True)
        if is_taken and self.average is not None:
            self.average.update()
        return norm

    def _clip(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Clip the gradients by the phase's algorithm, at once or by the optimiser's next step as it reads them; return
        the norm of all of them before that."""
        groups, limit = self.objective.clip_groups(), self.phase.max_grad_norm
        if self.adagc is not None:
            return self.adagc(groups)
        if self.phase.gradient_clip_algorithm == "value" and limit is not None:
            return clip_values(groups, limit, has_stages=self.has_stages, copies=self.objective.replicated_params())
        step = clipping_step(optimizer)
        return clip_gradients(
            groups,
            limit,
            has_stages=self.has_stages,
            copies=self.objective.replicated_params(),
            hand_over=None if step is None else step.take_clip,
        )

    @property
    def _scaler(self) -> torch.amp.GradScaler | None:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def _overflows(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether gradients are not finite for the scale of the loss alone, which is then halved and the step left out.

        At a scale of 1 or below it is not the scale that makes them so.
        """
        scaler = self._scaler
        if scaler is None or bool(torch.isfinite(norm)):
            return False
        return bool(torch.isfinite(loss)) and scaler.get_scale() > 1.0

    def finish(self) -> None:
        """Turn the trained weights into those that are saved: in float32, masters and averages in their place, merged
        and gathered."""
        if self.phase.has_16_bit_weights:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.float()
            optimizer = self.trainer.optimizers[0]
            if isinstance(optimizer, MasterWeights):
                optimizer.restore()
        if self.average is not None:
            self.average.copy_to_weights()
        self.objective.finish()

    def on_validation_start(self) -> None:
        # What is measured is what the phase will save.
        if self.average is not None:
            self.average.swap_in()

    def on_validation_end(self) -> None:
        if self.way == SHARDED:
            reshard(self.model)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        counted = (batch[1] != IGNORED).sum()
        self.val_loss.update(self.objective.evaluate(batch)["loss"], weight=counted)

    def on_validation_epoch_end(self) -> None:
        if self.average is not None:  # before any callback saves a state, at the end of the validation
            self.average.swap_out()
        found = self.held_out = float(self.val_loss.compute())
        self.record({"val_loss": found})
        # For Lightning's callbacks alone: its loggers would repeat it at every step until the next.
        self.log("val_loss", found, logger=False, batch_size=1)
        self.val_loss.reset()

    def running_loss(self) -> float:
        """Return the mean loss of the last 50 optimiser steps in nats, over all ranks."""
        return self.train_loss.mean(over_ranks=self.shares_blocks)

    def refuse_divergence(self) -> None:
        """Raise when a weight is not finite, so that nothing worthless is saved over something good.

        Raises:
            CarambaError: training has diverged.
        """
        self.watch.flush()
        named = list(self.model.named_parameters())
        bad = next((name for name, value in named if not bool(torch.isfinite(local(value)).all())), None)
        is_finite = all_agree(bad is None, named[0][1].device)
        if not is_finite:
            raise CarambaError(
                f"{self.phase.phase}: {bad or 'a weight of another rank'} is not finite at step {self.global_step}: "
                f"training has diverged; lower lr (now {self.phase.lr}), lengthen warmup_steps, or lower max_grad_norm"
            )

    def record(self, values: dict[str, float]) -> None:
        """Send one row of metrics to every logger under the current optimiser step.

        Lightning's own `self.log` would repeat the last values at every step between two rows.
        """
        for logger in self.loggers:
            logger.log_metrics(values, step=self.global_step)

    def prepare_save(self) -> None:
        """Have on every rank what a state is made of, before it is taken."""
        if self.shares_blocks:
            self.objective.finish()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Random state is taken at the end of a batch and put back before the next, so that dropout continues unchanged.
        checkpoint["rng"] = random_states(self.trainer.strategy.root_device)
        checkpoint["running_loss"] = self.train_loss.state_dict()
        checkpoint["nonfinite"] = self.watch.state_dict()
        checkpoint["held_out"] = self.held_out
        for name in KEPT:
            if (kept := getattr(self, name)) is not None:
                checkpoint[name] = kept.state_dict()
        own = {key: checkpoint.pop(key) for key in self._own_keys if key in checkpoint}
        checkpoint["ranks"] = gather_on_main(on_host(own))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._take_own(checkpoint)
        _recount(checkpoint, self.phase.gradient_accumulation_steps)
        self._rng: dict[str, Any] | None = checkpoint["rng"]
        self.train_loss.load_state_dict(checkpoint["running_loss"])
        self.watch.load_state_dict(checkpoint["nonfinite"])
        self.held_out = checkpoint.get("held_out")  # states of before have none
        self._kept: dict[str, Any] = {name: checkpoint[name] for name in KEPT if name in checkpoint}

    def _take_own(self, checkpoint: dict[str, Any]) -> None:
        """Put what this rank had where Lightning looks for it; a rank that is new takes what rank 0 had, and keeps its
        own random state."""
        ranks = checkpoint.get("ranks", [{}])
        if (self.shares_blocks or self.has_stages) and len(ranks) != get_world_size():
            what = "parallel=pipeline" if self.has_stages else "parallel.blockwise=blocks"
            raise CheckpointError(
                f"{self.phase.phase}: {what} was saved by {len(ranks)} ranks, and there are "
                f"{get_world_size()}: other ranks would own other blocks; start {len(ranks)}"
            )
        if get_rank() < len(ranks):
            checkpoint.update(ranks[get_rank()])
        else:
            checkpoint.update({**ranks[0], "rng": None})

    def on_train_start(self) -> None:
        # Made by configure_optimizers, after the state was read.
        kept, self._kept = getattr(self, "_kept", {}), {}
        for name, state in kept.items():
            getattr(self, name).load_state_dict(state)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        rng, self._rng = getattr(self, "_rng", None), None
        if rng is not None:
            restore_random_states(rng, self.trainer.strategy.root_device)


def on_host(value: Any) -> Any:
    """Return plain values with their tensors on the host."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    return type(value)(on_host(item) for item in value) if isinstance(value, list | tuple) else value


def _recount(checkpoint: dict[str, Any], accumulation: int) -> None:
    """Count a state's micro-batches as this phase accumulates them, which may be more than when it was saved: Lightning
    takes the steps of validation from this count."""
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    missing = checkpoint["global_step"] * accumulation - progress["total"]["ready"]
    for counts in (progress["total"], progress["current"]):
        for name in counts:
            counts[name] += missing
