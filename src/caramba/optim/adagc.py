"""AdaGC: every tensor's gradient clipped by the norms that it has had."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from caramba.optim.clip import clip_gradients, tensor_norms
from caramba.optim.groups import local


class AdaGC:
    """Clip each tensor's gradient to `relative` times gamma, a running average of its own norms after clipping:

        h_i = min(1, relative gamma_i / |g_i|),  g_i <- h_i g_i,  gamma_i <- beta gamma_i + (1 - beta) h_i |g_i|

    In the first `warmup_steps` steps gradients are clipped by their norm in groups to `max_norm` (None: not at all) as
    `clip_gradients` does, and gamma_i is the least norm that tensor i has had after that. A norm of zero, which
    low-rank updates begin with, is no norm to go by, and a gradient that is not finite leaves every average as it was.
    Nothing waits for the device. The state is one number per tensor, in at least float32, and the count of steps.

    Reference: Wang et al., 2025, arXiv:2502.11034, algorithm 1.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        beta: float = 0.98,
        relative: float = 1.05,
        warmup_steps: int = 100,
        max_norm: float | None = 1.0,
    ) -> None:
        self.parameters = list(parameters)
        self.beta, self.relative, self.warmup_steps, self.max_norm = beta, relative, warmup_steps, max_norm
        self.steps = 0
        self.gamma = torch.full((len(self.parameters),), torch.inf)  # no norm yet
        self._places: tuple[list[int], Any] | None = None

    @torch.no_grad()
    def __call__(self, groups: Sequence[Sequence[nn.Parameter]]) -> Tensor:
        """Clip the gradients in place; return the norm of all of them before that, []."""
        is_warm_up = self.steps < self.warmup_steps
        total = clip_gradients(groups, self.max_norm if is_warm_up else None)
        self._observe(total, clips=not is_warm_up)
        return total

    def _observe(self, total: Tensor, *, clips: bool = False, later: Tensor | None = None) -> None:
        """Average the norms of gradients, which `clips` clips. Otherwise something else has clipped them, or does
        `later` by that factor: their norms are taken as they would be after AdaGC."""
        places = [place for place, p in enumerate(self.parameters) if p.grad is not None]
        is_warm_up, self.steps = self.steps < self.warmup_steps, self.steps + 1
        if not places:
            return
        gradients = [grad for p in self.parameters if (grad := p.grad) is not None]
        norms = tensor_norms(gradients)
        norms = norms if later is None else norms * later
        self.gamma = self.gamma.to(norms)
        index = self._index(places)
        gamma = self.gamma[index]
        if is_warm_up:
            after = torch.minimum(gamma, norms)
        else:
            clipped = torch.minimum(norms, self.relative * gamma)
            if clips:
                tiny = torch.finfo(norms.dtype).tiny
                scales = (self.relative * gamma / norms.clamp_min(tiny)).clamp(max=1.0)
                torch._foreach_mul_([local(grad) for grad in gradients], list(scales.unbind()))  # pyright: ignore[reportPrivateImportUsage]
                clipped = norms * scales
            after = torch.where(gamma.isinf(), clipped, self.beta * gamma + (1.0 - self.beta) * clipped)
        self.gamma[index] = torch.where((norms > 0) & torch.isfinite(total), after, gamma)

    def _index(self, places: list[int]) -> Any:
        """Return what takes these places of gamma; copied to the device once, as each such copy waits for it."""
        if len(places) == len(self.parameters):
            return slice(None)
        if self._places is None or self._places[0] != places:
            self._places = places, torch.tensor(places, device=self.gamma.device)
        return self._places[1]

    def state_dict(self) -> dict[str, int | Tensor]:
        return {"steps": self.steps, "gamma": self.gamma}

    def load_state_dict(self, state: Mapping[str, int | Tensor]) -> None:
        steps, gamma = state["steps"], state["gamma"]
        assert isinstance(steps, int)
        assert isinstance(gamma, Tensor)
        self.steps, self.gamma = steps, gamma.clone()
