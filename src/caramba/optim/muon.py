"""Muon for the matrices of a stack and AdamW for everything else, as one optimiser."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from caramba.optim.adamw import AdamW
from caramba.optim.groups import call_closure

LIKE_ADAMW = "match_rms_adamw"


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
            parts.append(torch.optim.Muon(list(matrices), lr=lr, momentum=momentum, adjust_lr_fn=LIKE_ADAMW))
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
