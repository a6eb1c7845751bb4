"""PIDAO: gradient descent as a system under PID control, by the semi-implicit steps of its differential equation."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from caramba.errors import ConfigError
from caramba.optim.groups import call_closure, local


class PIDAO(torch.optim.Optimizer):
    """Discretise the equation of a PID controller around the gradient g by semi-implicit steps of lr:

        z <- z + lr g,  y <- (y - lr (kp - a kd) g - lr ki z) / (1 + a lr),  w <- w + lr y - lr kd g

    The equation is x'' + a x' + kp g + ki z + kd g' = 0 with z the integral of g and y = x' + kd g; a is `damping`.
    `adaptive` divides g and z by sqrt(v / (1 - beta2^k)) + eps, v the average of g^2 at step k, so that an update is
    about lr kp / a. A constant gradient is followed at lr kp / a; the velocity forgets in 1 / (a lr) steps. Weight
    decay is decoupled and goes with lr.

    Raises:
        ConfigError: a coefficient below 0, a damping of 0, or ki from a kp on, where a quadratic's minimum repels.

    Reference: Chen et al., 2024, Nature Communications 15:10263 (PIDAO-SI and its variant by second moments, whose
    published code divides v by the constant 1 - beta2^2 in place of 1 - beta2^k).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        *,
        kp: float,
        ki: float,
        kd: float,
        damping: float,
        adaptive: bool = False,
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if min(kp, ki, kd) < 0 or damping <= 0 or ki >= damping * kp:
            raise ConfigError(
                f"pidao: kp={kp}, ki={ki}, kd={kd}, damping={damping}, expected kp, ki, kd from 0, damping above 0 and "
                "ki below damping * kp; lower ki"
            )
        gains = {"kp": kp, "ki": ki, "kd": kd, "damping": damping}
        own = {"adaptive": adaptive, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **gains, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what `closure`, run first, returns."""
        loss = call_closure(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(group, p)
        return loss

    def _step(self, group: dict[str, Any], p: Any) -> None:
        state, lr, damping = self.state[p], group["lr"], group["damping"]
        for name in ("integral", "velocity", *(("exp_avg_sq",) if group["adaptive"] else ())):
            if name not in state:
                state[name] = torch.zeros_like(p)
        grad, weight = local(p.grad), local(p)
        z, y = local(state["integral"]).add_(grad, alpha=lr), local(state["velocity"])
        if group["adaptive"]:
            state["step"] = state.get("step", torch.zeros(())) + 1
            beta2, v = group["beta2"], local(state["exp_avg_sq"])
            v.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            size = (v.sqrt() / math.sqrt(1.0 - beta2 ** float(state["step"]))).add_(group["eps"])
            grad, z = grad / size, z / size
        y.add_(grad, alpha=-lr * (group["kp"] - damping * group["kd"])).add_(z, alpha=-lr * group["ki"])
        y.div_(1.0 + damping * lr)
        weight.mul_(1.0 - lr * group["weight_decay"])
        weight.add_(y, alpha=lr).add_(grad, alpha=-lr * group["kd"])
