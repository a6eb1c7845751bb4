"""Lion: the sign of a momentum, one state for each weight."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from caramba.errors import ConfigError
from caramba.ops.lion import lion_step
from caramba.optim.groups import call_closure


class Lion(torch.optim.Optimizer):
    """Lion: step by lr against the sign of averaged gradients, all tensors of a device in one launch:

        w <- (1 - lr weight_decay) w - lr sign(beta1 m + (1 - beta1) g),  m <- beta2 m + (1 - beta2) g

    A step has the same size for every weight, so lr is 3 to 10 times smaller than AdamW's, and weight_decay as many
    times larger. The state `momentum` starts at 0, in the parameter's dtype. Parameters are contiguous.

    Raises:
        ConfigError: a beta outside [0, 1).

    Reference: Chen et al., 2023, arXiv:2302.06675.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ConfigError(f"lion: betas={list(betas)}, expected two numbers from 0 to below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what `closure`, run first, returns."""
        loss = call_closure(closure)
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for tensors in self._by_device(group["params"]).values():
                lion_step(
                    *zip(*tensors, strict=True),
                    lr=group["lr"],
                    beta1=beta1,
                    beta2=beta2,
                    weight_decay=group["weight_decay"],
                )
        return loss

    def _by_device(self, parameters: Iterable[nn.Parameter]) -> dict[torch.device, list[tuple[Tensor, Tensor, Tensor]]]:
        """Return (parameter, momentum, gradient) of those that have a gradient."""
        found: dict[torch.device, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for parameter in parameters:
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(parameter)
            found.setdefault(parameter.device, []).append((parameter, state["momentum"], parameter.grad.contiguous()))
        return found
