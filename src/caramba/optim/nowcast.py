"""Nowcasting in closed form: weights some steps ahead, from a few snapshots, tensor by tensor."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

SMALLEST = 1e-12


def forecast_line(snapshots: Sequence[Tensor], ahead: float) -> Tensor:
    """Return the least-squares line of each weight through equally spaced snapshots, `ahead` spacings past the last."""
    n = len(snapshots)
    times = [at - (n - 1) / 2 for at in range(n)]
    norm = sum(t * t for t in times)
    mean = torch.stack(list(snapshots)).mean(0)
    slope = sum((s * (t / norm) for s, t in zip(snapshots, times, strict=True)), torch.zeros_like(mean))
    return mean + slope * ((n - 1) / 2 + ahead)


def forecast_exponential(snapshots: Sequence[Tensor], ahead: float) -> Tensor:
    """Return the last snapshot moved along the last difference d, damped by r of each spacing:

        w + d (r + r^2 + ... + r^ahead),  r = the share of d in the difference before it, from 0 to 0.99

    One r for a tensor, d.d' / d'.d' of the last difference and the one before.
    """
    last, before, first = snapshots[-1], snapshots[-2], snapshots[-3]
    step, earlier = last - before, before - first
    squares = float((earlier * earlier).sum())
    ratio = float((step * earlier).sum()) / max(squares, SMALLEST)
    ratio = min(max(ratio, 0.0), 0.99)
    return last + step * (ratio * (1.0 - ratio**ahead) / (1.0 - ratio))


def forecast_anderson(snapshots: Sequence[Tensor], ahead: float) -> Tensor:
    """Return the combination of snapshots whose differences cancel best (Anderson acceleration); `ahead` is not used.

    Weights sum to 1 and minimise |sum a_i (w_{i+1} - w_i)|^2 with a small ridge.

    Reference: Anderson, 1965; Walker and Ni, 2011.
    """
    del ahead
    differences = torch.stack([(b - a).flatten() for a, b in itertools.pairwise(snapshots)])
    gram = (differences @ differences.T).cpu().double()
    ridge = 1e-6 * float(gram.diagonal().mean()) + SMALLEST
    ones = torch.ones(len(gram), dtype=torch.float64)
    solved = torch.linalg.solve(gram + ridge * torch.eye(len(gram), dtype=torch.float64), ones)
    shares = (solved / solved.sum()).to(snapshots[0])
    return sum((s * share for s, share in zip(snapshots[1:], shares, strict=True)), torch.zeros_like(snapshots[0]))


FORECASTS: Mapping[str, Callable[[Sequence[Tensor], float], Tensor]] = {
    "line": forecast_line,
    "exponential": forecast_exponential,
    "anderson": forecast_anderson,
}


class Snapshots:
    """The weights of one and of two spacings before a decision, in float32 on the host: two copies, and no more.

    A forecast takes the weights at the decision as the third.
    """

    def __init__(self, interval: int) -> None:
        self.interval, self.spacing = interval, max(1, interval // 5)
        self.steps: list[int] = []
        self.weights: list[list[Tensor]] = []

    def is_due(self, step: int) -> bool:
        """Whether the weights after `step` steps are one or two spacings before a decision."""
        return any((step + n * self.spacing) % self.interval == 0 for n in (1, 2))

    def take(self, step: int, parameters: Sequence[Tensor]) -> None:
        """Keep the weights of a step; the oldest ones go, and all where a step is missing between them."""
        if self.steps and step - self.steps[-1] != self.spacing:
            self.clear()
        self.steps, self.weights = self.steps[-1:], self.weights[-1:]
        self.steps.append(step)
        self.weights.append([p.detach().to("cpu", torch.float32, copy=True) for p in parameters])

    def is_enough(self, step: int) -> bool:
        """Whether a decision after `step` steps has both."""
        return self.steps == [step - 2 * self.spacing, step - self.spacing]

    def clear(self) -> None:
        self.steps, self.weights = [], []

    def forecast(self, name: str, ahead: float, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return forecast weights `ahead` spacings past `parameters`, on their device."""
        return [
            FORECASTS[name]([*column, p.detach().to("cpu", torch.float32)], ahead).to(p.device)
            for p, *column in zip(parameters, *self.weights, strict=True)
        ]

    def state_dict(self) -> dict[str, object]:
        return {"steps": list(self.steps), "weights": [list(one) for one in self.weights]}

    def load_state_dict(self, state: Mapping[str, list[object]]) -> None:
        self.steps, self.weights = list(state["steps"]), [list(one) for one in state["weights"]]  # type: ignore[arg-type, call-overload]
