"""An exponential moving average of trained weights."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

WARM_UP = 10


class WeightAverage:
    """Exponential moving average of weights: a <- d a + (1 - d) w after each step.

    d = min(decay, (1 + n) / (10 + n)) at step n, so early weights decay quickly. Stored in at least float32.

    Reference: Polyak and Juditsky, 1992; the warm-up is TensorFlow's ExponentialMovingAverage.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay, self.steps = decay, 0
        self._parameters = dict(named)
        self._weights: dict[str, Tensor] = {}  # the trained weights, between `swap_in` and `swap_out`
        self._average = {
            name: value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for name, value in self._parameters.items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights of one more step to the average."""
        self.steps += 1
        weight = 1.0 - min(self.decay, (1 + self.steps) / (WARM_UP + self.steps))
        for name, value in self._parameters.items():
            if self._average[name].device != value.device:  # the model has moved since
                self._average[name] = self._average[name].to(value.device)
            self._average[name].lerp_(value.to(self._average[name].dtype), weight)

    @torch.no_grad()
    def copy_to_weights(self) -> None:
        """Put the average in place of the weights."""
        for name, value in self._parameters.items():
            value.copy_(self._average[name])

    @torch.no_grad()
    def swap_in(self) -> None:
        """Copy the average into the weights' memory until `swap_out`, so that compiled code sees it."""
        self._weights = {name: value.detach().clone() for name, value in self._parameters.items()}
        self.copy_to_weights()

    @torch.no_grad()
    def swap_out(self) -> None:
        """Restore the trained weights exactly."""
        for name, value in self._weights.items():
            self._parameters[name].copy_(value)
        self._weights = {}

    def state_dict(self) -> dict[str, int | dict[str, Tensor]]:
        return {"steps": self.steps, "average": dict(self._average)}

    def load_state_dict(self, state: Mapping[str, int | dict[str, Tensor]]) -> None:
        steps, average = state["steps"], state["average"]
        assert isinstance(steps, int)
        assert isinstance(average, dict)
        self.steps = steps
        for name, value in average.items():
            self._average[name].copy_(value)
