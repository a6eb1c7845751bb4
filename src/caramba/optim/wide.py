"""An optimiser over float32 copies of the weights: kept ones, here or on the host, or those of a step that are rounded
at random."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from caramba.ops import has_kernel
from caramba.optim.adamw import AdamW
from caramba.optim.groups import Named
from caramba.runtime import synchronize


class WideWeights(torch.optim.Optimizer):
    """Steps float32 copies of weights with any optimiser, whose states are then float32 too.

    With `keeps` the copies (masters) stay and a weight is its master rounded to nearest, as exact as float32 weights.
    Without, a copy is made of each weight for the step and rounded back at random, up with the probability of how far
    up it is, so that the expected weight is exact and small updates are not lost; nothing but the states stays.

    With `on_host` masters and states are in the host's memory, and the step is taken there: gradients go down and
    weights come up once a step. `param_groups` are the inner optimiser's, over the copies. The randomness is torch's
    global generator of the device, which a run seeds and saves.

    Reference: Micikevicius et al., 2018, arXiv:1710.03740 (masters); Zamirai et al., 2020, arXiv:2010.06192
    (stochastic rounding).
    """

    def __init__(
        self,
        named: Sequence[Named],
        build: Callable[[list[Named]], torch.optim.Optimizer],
        *,
        keeps: bool,
        on_host: bool = False,
    ) -> None:
        self.keeps, self.on_host = keeps, on_host
        self.weights = [weight for _, weight in named]
        self.wide = [nn.Parameter(self._copy_of(weight)) for weight in self.weights]
        self.inner = build([(name, wide) for (name, _), wide in zip(named, self.wide, strict=True)])
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self._masters = dict(zip(self.wide, self.weights, strict=True))
        self._release()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient; return what `closure`, run first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = self.one_pass
        if inner is not None and inner.takes(self._masters):
            inner.step_masters(self._masters)  # neither gradients nor weights are copied
            return loss
        stepped = [pair for pair in zip(self.weights, self.wide, strict=True) if pair[0].grad is not None]
        for weight, wide in stepped:
            if not self.keeps:
                wide.data = weight.detach().float()
            assert weight.grad is not None
            wide.grad = weight.grad.to(wide.device, torch.float32, non_blocking=True)
        if self.on_host and stepped:
            synchronize(
                stepped[0][0].device
            )  # gradients are here, and the weights of the step before are there
        self.inner.step()
        for weight, wide in stepped:
            weight.copy_(wide if self.keeps else round_at_random(wide, weight.dtype), non_blocking=True)
            wide.grad = None
        self._release()
        return loss

    @property
    def one_pass(self) -> AdamW | None:
        """The inner optimiser if it can step masters by their weights' gradients and round them into the weights."""
        return self.inner if self.keeps and not self.on_host and isinstance(self.inner, AdamW) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the weights' gradients; those of the copies live within a step only."""
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Put the masters in place of the weights, which are float32 by now; without masters do nothing."""
        if self.keeps:
            for weight, wide in zip(self.weights, self.wide, strict=True):
                weight.copy_(wide)

    def forget(self) -> None:
        """Let masters and states go, when no step follows."""
        self.state.clear()
        self.inner.state.clear()
        for wide in self.wide:
            wide.data = wide.data.new_empty(0)

    def state_dict(self) -> dict[str, Any]:
        masters = [wide.detach() for wide in self.wide] if self.keeps else []
        return {"inner": self.inner.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for wide, master in zip(self.wide, state_dict["masters"], strict=self.keeps):
            wide.copy_(master)
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups

    def _copy_of(self, weight: Tensor) -> Tensor:
        """Return a float32 copy of a weight, or the memory of one that is float32 and about to be narrowed."""
        if not self.on_host:
            return weight.detach().float()
        copy = torch.empty(weight.shape, dtype=torch.float32, pin_memory=weight.is_cuda)
        return copy.copy_(weight.detach())

    def _release(self) -> None:
        """Give the memory of copies back that are made anew at the next step."""
        if not self.keeps:
            for wide in self.wide:
                wide.data = wide.data.new_empty(0)


def round_at_random(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 to bfloat16 so that the mean is x: away from zero with probability (|x| - |l|) / (|u| - |l|), l and
    u the neighbours of x. What bfloat16 has, zeros and infinities too, stays.

    Raises:
        AssertionError: another pair of dtypes.
    """
    assert (x.dtype, dtype) == (torch.float32, torch.bfloat16)
    # A bfloat16 is the upper half of a float32: what is added to the lower half carries over as often as it should.
    bits = x.detach().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    rounded = (bits + noise).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x).to(dtype)


def clipping_step(optimizer: torch.optim.Optimizer) -> AdamW | None:
    """Return the optimiser whose next step multiplies gradients by a clip as its kernel reads them, if there is one."""
    inner = optimizer.one_pass if isinstance(optimizer, WideWeights) else optimizer
    if not isinstance(inner, AdamW):
        return None
    first = next((p for group in inner.param_groups for p in group["params"]), None)
    return inner if first is not None and has_kernel("adamw_step", first) else None
