"""SWATS: Adam until the rate that SGD would need has settled, then SGD with momentum at that rate."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from caramba.errors import ConfigError
from caramba.optim.groups import call_closure, complete_squares, local


class SWATS(torch.optim.Optimizer):
    """Step by Adam, estimate each step's SGD rate gamma, and switch to SGD once it has settled:

        p = -lr sqrt(1 - beta2^k) / (1 - beta1^k) m / (sqrt(v) + eps),  gamma = p.p / -(p.g)
        lambda <- beta2 lambda + (1 - beta2) gamma;  switch if |lambda / (1 - beta2^k) - gamma| < tolerance
        u <- beta1 u + g,  w <- w - (1 - beta1) L u,  L = lambda / (1 - beta2^k) at the switch

    Dot products are over all weights, as in the paper. `tolerance` is not Adam's `eps`, and only a positive rate
    switches. After the switch lr scales L by what the schedule makes of the lr of that step. Weight decay is decoupled
    and goes with lr in both parts. Each step reads one number from the device until the switch.

    Raises:
        ConfigError: a beta outside [0, 1), or a tolerance that is not positive.

    Reference: Keskar and Socher, 2017, arXiv:1712.07628, algorithm 1.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        eps: float = 1e-8,
        tolerance: float = 1e-9,
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"swats: betas={list(betas)}, expected two numbers from 0 to below 1")
        if tolerance <= 0:
            raise ConfigError(f"swats: tolerance={tolerance}, expected a number above 0")
        own = {"k": 0, "estimates": 0, "average_rate": 0.0, "sgd_rate": None, "lr_at_switch": None}
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "tolerance": tolerance,
                "weight_decay": weight_decay,
                **own,
            },
        )

    @property
    def sgd_rate(self) -> float | None:
        """The rate that SGD has taken over with; None before the switch."""
        return self.param_groups[0]["sgd_rate"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what `closure`, run first, returns."""
        loss = call_closure(closure)
        steps_sgd = self.sgd_rate is not None
        dots: list[tuple[Any, Tensor, Tensor]] = []
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                local(p).mul_(1.0 - group["lr"] * group["weight_decay"])
                if steps_sgd:
                    self._step_sgd(group, p)
                else:
                    update, grad = self._step_adam(group, p), local(p.grad)
                    dots.append((p, (update * update).sum(), (update * grad).sum()))
        if dots:
            self._estimate(dots)
        return loss

    def _step_adam(self, group: dict[str, Any], p: Any) -> Tensor:
        state, (beta1, beta2), k = self.state[p], group["betas"], group["k"]
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        grad, m, v = local(p.grad), local(state["exp_avg"]), local(state["exp_avg_sq"])
        m.lerp_(grad, 1.0 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        rate = group["lr"] * math.sqrt(1.0 - beta2**k) / (1.0 - beta1**k)
        update = (m / (v.sqrt() + group["eps"])).mul_(-rate)
        local(p).add_(update)
        return update

    def _step_sgd(self, group: dict[str, Any], p: Any) -> None:
        state, beta1 = self.state[p], group["betas"][0]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = local(state["momentum_buffer"]).mul_(beta1).add_(local(p.grad))
        scale = group["lr"] / group["lr_at_switch"] if group["lr_at_switch"] else 1.0
        local(p).add_(buffer, alpha=-(1.0 - beta1) * group["sgd_rate"] * scale)

    def _estimate(self, dots: list[tuple[Any, Tensor, Tensor]]) -> None:
        tensors = [p for p, _, _ in dots]
        first = dots[0][1]
        sums = [complete_squares(torch.stack([row[at].to(first) for row in dots]), tensors).sum() for at in (1, 2)]
        squares, along = (float(x) for x in torch.stack(sums))
        if along == 0.0 or not math.isfinite(squares / along):
            return
        group = self.param_groups[0]
        beta2, rate = group["betas"][1], squares / -along
        estimates = group["estimates"] + 1
        average = beta2 * group["average_rate"] + (1.0 - beta2) * rate
        settled = average / (1.0 - beta2**estimates)
        switches = estimates > 1 and settled > 0 and abs(settled - rate) < group["tolerance"]
        for one in self.param_groups:
            one["average_rate"], one["estimates"] = average, estimates
            if switches:
                one["sgd_rate"], one["lr_at_switch"] = settled, one["lr"]
        if switches:
            for state in self.state.values():  # SGD begins with a velocity of 0, and has no second moment
                state.clear()
