"""Trials: steps of a strategy from the weights and states at a boundary, scored on windows that nothing has read."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from caramba.config.train import PhaseConfig
from caramba.data import IGNORED, WindowSampler
from caramba.distill import Objective
from caramba.errors import ConfigError
from caramba.optim.portfolio import Portfolio
from caramba.runtime import (
    is_distributed,
    is_out_of_memory,
    mean_over_ranks,
    random_states,
    restore_random_states,
)
from caramba.train.callbacks import Compilation
from caramba.train.data import IndexedWindows, train_loader

MOST_HELD_OUT, LEAST_HELD_OUT = 64, 8


class TrialData:
    """The windows of trials: those that train next, and those after the end of the phase, which score.

    All are of the train split, so no benchmark's. Windows that score are read by no step of the phase or of phases
    before it: the stream is a permutation of all windows, and they follow its last sample.

    Raises:
        ConfigError: the phase reads all windows.
    """

    def __init__(
        self,
        dataset: Any,
        phase: PhaseConfig,
        *,
        seed: int,
        start: int,
        per_step: int,
        share: tuple[int, int],
    ) -> None:
        self.dataset, self.phase, self.seed, self.start = dataset, phase, seed, start
        self.per_step, self.share = per_step, share
        n = len(dataset)
        ahead = (phase.orchestrator_repeats + 1) * phase.orchestrator_eval_horizon
        first = start + (phase.steps + ahead) * per_step
        count = min(MOST_HELD_OUT, n - first)
        if count < LEAST_HELD_OUT:
            raise ConfigError(
                f"train.orchestrator_enabled: {n:,} windows of the train split, of which phases and trials read "
                f"{first:,}, leave {max(0, n - first)} to score decisions by, expected {LEAST_HELD_OUT} or more; use "
                "fewer steps, a smaller batch or more data, or orchestrator_mode=monitor"
            )
        sampler = WindowSampler(n, per_step, seed=seed)
        self.held_out = [sampler.window(first + place) for place in range(count)]

    def batches(self, step: int, repeat: int) -> Iterator[Any]:
        """Return this rank's micro-batches of a trial that begins at `step`; repeats read on where the last ends."""
        at = step + repeat * self.phase.orchestrator_eval_horizon
        phase = self.phase.model_copy(update={"num_workers": 0})
        start = self.start + at * self.per_step
        return iter(train_loader(self.dataset, phase, seed=self.seed, start=start, pin=False, share=self.share))

    def scoring(self, half: int | None) -> DataLoader[Any]:
        """Return batches of the windows that score: a half, for the choice of a challenger or its test, or all."""
        windows = self.held_out if half is None else self.held_out[half::2]
        source = IndexedWindows(self.dataset) if self.phase.stores_teacher else self.dataset
        assert isinstance(self.phase.batch_size, int)
        return DataLoader(Subset(source, windows), batch_size=self.phase.batch_size)


class Fork:
    """Weights, buffers, optimiser, clipping and random state at a boundary, which every trial begins from."""

    def __init__(self, module: Any, portfolio: Portfolio, device: torch.device) -> None:
        self.module, self.portfolio, self.device = module, portfolio, device
        tensors = [p for _, p in module.objective.trainable()] + list(module.model.buffers())
        self._tensors = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._captured = portfolio.capture()
        self._adagc = None if module.adagc is None else module.adagc.state_dict()
        if self._adagc is not None:
            self._adagc = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in self._adagc.items()
            }
        self._rng = random_states(device)

    @torch.no_grad()
    def restore(self) -> None:
        """Go back to the boundary, to the bit."""
        for tensor, kept in self._tensors:
            tensor.copy_(kept)
        self.portfolio.restore(self._captured)
        if self._adagc is not None:
            self.module.adagc.load_state_dict(self._adagc)
        self.portfolio.zero_grad(set_to_none=True)
        restore_random_states(self._rng, self.device)


class Trials:
    """Runs trials from a fork, and counts what they cost: `steps`, and `seconds` with their scoring.

    A strategy has its own rate after an eighth of a trial: with the phase's ramp it would be judged by that of another.
    """

    def __init__(self, module: Any, portfolio: Portfolio, data: TrialData, device: torch.device) -> None:
        self.module, self.portfolio, self.data, self.device = module, portfolio, data, device
        self.phase: PhaseConfig = module.phase
        self.steps, self.seconds = 0, 0.0
        self._compilations = [one for one in module.trainer.callbacks if isinstance(one, Compilation)]

    def score(
        self,
        fork: Fork,
        name: str,
        step: int,
        *,
        horizon: int,
        repeat: int,
        half: int | None,
        before: Callable[[], None] | None = None,
    ) -> float:
        """Return the held-out loss after `horizon` steps of strategy `name` whose rate decays to 0, from the boundary.

        A trial that diverges or runs out of memory scores infinity. Weights and states are as before.
        """
        began = time.perf_counter()
        was_training, ramp = self.module.model.training, self.portfolio.ramp_steps
        try:
            torch.manual_seed(hash_of(self.phase.seed or 0, step, repeat))
            if before is not None:
                before()
            self.portfolio.ramp_steps = min(ramp, max(1, horizon // 8))
            self.portfolio.switch(name)
            self._train(step, horizon, repeat)
            loss = self._held_out(half)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or is_distributed():
                raise
            loss = math.inf
        finally:
            self.module.model.train(was_training)
            self.portfolio.ramp_steps = ramp
            fork.restore()
        self.steps += horizon
        self.seconds += time.perf_counter() - began
        return loss if math.isfinite(loss) else math.inf

    def _begin_step(self) -> None:
        for one in self._compilations:
            one.begin_step()

    def _moved(self, x: Tensor) -> Tensor:
        """Return a tensor on the device, for which the host does not wait."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x.to(self.device)

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return self.module.trainer.precision_plugin.train_step_context()

    def _train(self, step: int, horizon: int, repeat: int) -> None:
        module, phase = self.module, self.phase
        batches = self.data.batches(step, repeat)
        times = phase.gradient_accumulation_steps
        for at in range(horizon):
            module.objective.at(step + at, phase.steps)
            for micro in range(times):
                if micro == 0:
                    self._begin_step()
                batch = [self._moved(x) for x in next(batches)]
                if module.averaging is not None and micro + 1 == times:
                    module.averaging.expect(batch[0].numel())
                weight = 1.0
                if module.targets_of is not None:  # as each counts in a step of the run
                    place = step + repeat * phase.orchestrator_eval_horizon + at
                    weight = float((batch[1] != IGNORED).sum()) / module.targets_of(place)
                with self._context():
                    module.objective.step(batch, lambda loss, weight=weight: (loss * weight / times).backward())
            if module.averaging is not None:
                module.averaging.finish()
            module.objective.join_gradients()
            rate = module._learning_rate(*module.objective.schedule_span(step, phase.steps))
            for group in self.portfolio.param_groups:
                group["lr"] = rate * (1.0 - at / horizon)
            module._clip(self.portfolio)
            self.portfolio.take_step()
            self.portfolio.zero_grad(set_to_none=True)

    def _held_out(self, half: int | None) -> float:
        self.module.model.eval()
        # Graphs without gradients would be compiled for these few batches alone.
        with torch.compiler.set_stance("force_eager"), self._context():
            mean = mean_loss(self.module.objective, self.data.scoring(half), self.device)
        return float(mean_over_ranks({"loss": torch.tensor(mean, device=self.device)})["loss"])


def mean_loss(objective: Objective, batches: Iterable[Any], device: torch.device) -> float:
    """Return an objective's mean loss over the targets of batches."""
    total, counted = 0.0, 0
    for windows in batches:
        batch = tuple(x.to(device) for x in windows)
        n = int((batch[1] != IGNORED).sum())
        total, counted = total + float(objective.evaluate(batch)["loss"]) * n, counted + n
    return total / max(1, counted)


def hash_of(*numbers: int) -> int:
    """Return a seed that depends on all numbers."""
    found = 0
    for number in numbers:
        found = (found * 1_000_003 + number + 1) % (2**62)
    return found
