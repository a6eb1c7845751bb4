"""Muon for the matrices of a stack and AdamW for everything else, as one optimiser."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from caramba.optim.adamw import AdamW
from caramba.optim.groups import call_closure, is_sharded

LIKE_ADAMW = "match_rms_adamw"
MOST_AT_ONCE = 2**24
"""Values of the matrices that are made orthogonal together: their products take some 0.2 GB."""


class Matrix(NamedTuple):
    """A weight [R, C] with its gradient and momentum."""

    weight: Tensor
    grad: Tensor
    momentum: Tensor


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` that makes matrices of one shape, or of its transpose, orthogonal by one set of launches.

    torch takes one matrix after the other: a small model then waits for the host. Groups and states are torch's.
    Where matrices are sharded over ranks, the step is torch's.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every matrix that has a gradient; return what `closure`, run first, returns."""
        if any(is_sharded(p) for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        loss = call_closure(closure)
        for group in self.param_groups:
            found: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
            self._init_group(group, *found)
            for alike in _alike([Matrix(*one) for one in zip(*found, strict=True)]):
                _step_alike(alike, group)
        return loss


def _is_tall(matrix: Matrix) -> bool:
    return matrix.weight.shape[0] > matrix.weight.shape[1]


def _alike(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """Yield matrices of one shape or its transpose, dtype and device, tall ones first, MOST_AT_ONCE values at most."""
    found: dict[Any, list[Matrix]] = {}
    for one in matrices:
        key = (tuple(sorted(one.weight.shape)), one.weight.dtype, one.grad.dtype, one.weight.device)
        found.setdefault(key, []).append(one)
    for alike in found.values():
        alike.sort(key=_is_tall, reverse=True)
        n = max(1, MOST_AT_ONCE // alike[0].weight.numel())
        yield from (alike[start : start + n] for start in range(0, len(alike), n))


def _step_alike(matrices: Sequence[Matrix], group: dict[str, Any]) -> None:
    """Step matrices of shape [C, R] with C > R, then those of shape [R, C]."""
    weights, grads, momenta = (list(part) for part in zip(*matrices, strict=True))
    lr, mu = group["lr"], group["momentum"]
    torch._foreach_lerp_(momenta, grads, 1 - mu)  # pyright: ignore[reportPrivateImportUsage]
    ahead = momenta
    if group["nesterov"]:
        ahead = torch._foreach_lerp(grads, momenta, mu)  # pyright: ignore[reportPrivateImportUsage]
    tall = sum(_is_tall(one) for one in matrices)
    wide = torch.stack([*(x.mT for x in ahead[:tall]), *ahead[tall:]]).bfloat16()
    found = orthogonal(wide, group["ns_coefficients"], steps=group["ns_steps"], eps=group["eps"])
    found = found.to(weights[0].dtype)
    updates = [*found[:tall].mT.contiguous().unbind(), *found[tall:].unbind()]
    size = 0.2 * math.sqrt(max(weights[0].shape)) * lr
    torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
    torch._foreach_add_(weights, updates, alpha=-size)  # pyright: ignore[reportPrivateImportUsage]


def orthogonal(x: Tensor, coefficients: tuple[float, float, float], *, steps: int, eps: float) -> Tensor:
    """Return U V^T of matrices U S V^T, with singular values of about 1, by Newton-Schulz steps in x's dtype.

    Shape: x and result [N, R, C] with R at most C.

    Reference: Jordan et al., 2024 (Muon).
    """
    a, b, c = coefficients
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class MuonAdamW(torch.optim.Optimizer):
    """Step matrices along their momentum with all singular values made about one, and other parameters by AdamW:

        m <- mu m + (1 - mu) g,  W <- (1 - lr weight_decay) W - 0.2 sqrt(max(rows, columns)) lr U V^T,
        U S V^T = (1 - mu) g + mu m

    U V^T comes from five Newton-Schulz steps in bfloat16, which leave singular values of 0.7 to 1.2. The factor gives
    updates the size of AdamW's, so that both parts take AdamW's lr and weight_decay. Groups of both parts are in
    `param_groups`, states in `state`, and it is saved and loaded as one optimiser.

    Reference: Jordan et al., 2024 (Muon); Liu et al., 2025, arXiv:2502.16982 (the factor).
    """

    def __init__(
        self,
        matrices: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        *,
        lr: float,
        momentum: float,
        betas: tuple[float, float],
    ) -> None:
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            parts.append(BatchedMuon(list(matrices), lr=lr, momentum=momentum, adjust_lr_fn=LIKE_ADAMW))
        if others:
            parts.append(AdamW(list(others), lr=lr, betas=betas))
        self.parts: tuple[torch.optim.Optimizer, ...] = ()
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = tuple(parts)
        self.share()

    def share(self) -> None:
        """Let the parts step this optimiser's own groups and states, after these were made or loaded."""
        start = 0
        for part in self.parts:
            stop = start + len(part.param_groups)
            part.param_groups, part.state = self.param_groups[start:stop], self.state
            start = stop

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what `closure`, run first, returns."""
        loss = call_closure(closure)
        for part in self.parts:
            part.step()
        return loss
