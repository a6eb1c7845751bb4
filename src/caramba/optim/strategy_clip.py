"""Clipping of a portfolio: by the phase's algorithm or AdaGC, as the active strategy asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from caramba.config.optimizer import AdaGCConfig
from caramba.optim.adagc import AdaGC
from caramba.optim.clip import clip_gradients, clip_values, clipping_step, tensor_norms
from caramba.optim.portfolio import Portfolio


class StrategyClip(AdaGC):
    """AdaGC while the active strategy clips by it, else the phase's clipping; averages of norms are kept throughout."""

    def __init__(self, portfolio: Portfolio, parameters: Sequence[nn.Parameter]) -> None:
        phase = portfolio.phase
        settings = phase.adagc or AdaGCConfig()
        super().__init__(parameters, max_norm=phase.max_grad_norm, **settings.model_dump())
        self.portfolio, self.algorithm = portfolio, phase.gradient_clip_algorithm

    @torch.no_grad()
    def __call__(self, groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
        if self.portfolio.strategy.clip == "adagc":
            return super().__call__(groups)
        step, later = clipping_step(self.portfolio), None
        if self.algorithm == "value" and self.max_norm is not None:
            total = clip_values(groups, self.max_norm)
        else:
            total = clip_gradients(groups, self.max_norm, hand_over=None if step is None else step.take_clip)
            later = None if step is None else step.clip
        self._observe(total, later)
        return total

    def _observe(self, total: Tensor, later: Tensor | None) -> None:
        """Average the norms of gradients that something else has clipped, or does `later` by that factor, as they would
        be after AdaGC."""
        places = [place for place, p in enumerate(self.parameters) if p.grad is not None]
        is_warm_up, self.steps = self.steps < self.warmup_steps, self.steps + 1
        if not places:
            return
        norms = tensor_norms([grad for p in self.parameters if (grad := p.grad) is not None])
        norms = norms if later is None else norms * later
        self.gamma = self.gamma.to(norms)
        index = self._index(places)
        gamma = self.gamma[index]
        if is_warm_up:
            after = torch.minimum(gamma, norms)
        else:
            clipped = torch.minimum(norms, self.relative * gamma)
            after = torch.where(gamma.isinf(), norms, self.beta * gamma + (1.0 - self.beta) * clipped)
        self.gamma[index] = torch.where((norms > 0) & torch.isfinite(total), after, gamma)


def build_strategy_clip(optimizer: Any, parameters: Sequence[nn.Parameter]) -> StrategyClip | None:
    """Return the clipping of a portfolio in which a strategy that may step asks for AdaGC; None where none does."""
    assert isinstance(optimizer, Portfolio)
    is_monitor = optimizer.phase.orchestrator_mode == "monitor"
    used = [optimizer.strategy] if is_monitor else optimizer.strategies.values()
    if not any(one.clip == "adagc" for one in used):
        return None
    return StrategyClip(optimizer, parameters)
