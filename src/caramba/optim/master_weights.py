"""An optimiser over float32 copies of the weights, kept here or on the host, or over bfloat16 weights that it rounds at
random, or whose other bits are in the moments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from caramba.ops import has_kernel, stochastic_round
from caramba.ops.packed_masters import unpack_masters
from caramba.ops.stochastic_round import chunks, reference_stochastic_round
from caramba.optim.adamw import AdamW, is_capturing
from caramba.optim.groups import Named
from caramba.optim.shards import local, of_rank_0
from caramba.runtime import synchronize

PARTS, LEAST = 16, 2**24
"""Weights are copied a sixteenth of them at a time, or the largest, or as many as together have so many elements."""
Pair = tuple[nn.Parameter, nn.Parameter]


class MasterWeights(torch.optim.Optimizer):
    """Steps weights in float32 with any optimiser, whose states are then float32 too.

    With `keeps` the copies (masters) stay and a weight is its master rounded to nearest, as exact as float32 weights.
    Without, each weight is rounded at random, up with the probability of how far up it is, so that the expected weight
    is exact and small updates are not lost; nothing but the states stays. AdamW's kernel reads and rounds the
    weights themselves. Without it, and for other optimisers, weights and gradients are copied for the step, some at a
    time, so that it needs little memory beside the states.

    With `in_moments`, of AdamW alone, what bfloat16 does not hold of a master is in the last bits of the states
    (`caramba.ops.packed_masters`): masters that take no memory, and a weight is its master rounded to nearest. What
    float32 weights had beyond bfloat16 when the optimiser was made is not among it.

    With `on_host` masters and states are in the host's memory, and the step is taken there: gradients go down and
    weights come up once a step. `param_groups` are the inner optimiser's, over the copies. The randomness is one number
    a step of torch's global generator of the device, which a run seeds and saves; ranks all take rank 0's, so that
    copies of a model stay one.

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
        in_moments: bool = False,
    ) -> None:
        self.keeps, self.on_host, self.in_moments = keeps, on_host, in_moments
        self.weights = [weight for _, weight in named]
        self.copies = [nn.Parameter(self._copy_of(weight)) for weight in self.weights]
        self.inner = build([(name, copy) for (name, _), copy in zip(named, self.copies, strict=True)])
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups
        self._masters = dict(zip(self.copies, self.weights, strict=True))
        self._release(list(zip(self.weights, self.copies, strict=True)))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every weight that has a gradient; return what `closure`, run first, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.in_moments:
            assert isinstance(self.inner, AdamW)
            self.inner.step_packed_masters(self._masters)
            return loss
        seed = None if self.keeps else self._draw()
        if self._step_fused(seed):  # neither gradients nor weights are copied
            return loss
        inner, first = self.inner, 0
        clip = inner.clip if isinstance(inner, AdamW) else None
        for part in self._parts():
            if isinstance(inner, AdamW):  # which forgets it after each step
                inner.clip = clip
            self._step_copies(part, seed, first)
            first += len(part)
        if isinstance(inner, AdamW):
            inner.clip = None
        return loss

    def _draw(self) -> Tensor:
        """Return the seed of a step's random rounding, [] int64, without waiting for the device."""
        return of_rank_0(torch.randint(2**63 - 1, (), device=local(self.weights[0]).device))

    def _step_fused(self, seed: Tensor | None) -> bool:
        inner = self.fused_inner
        if inner is None:
            return False
        if seed is None:
            is_taken = inner.takes(self._masters)
            if is_taken:
                inner.step_masters(self._masters)
            return is_taken
        is_taken = inner.supports_stochastic_rounding(self._masters)
        if is_taken:
            inner.step_stochastic_rounding(self._masters, seed)
        return is_taken

    def _parts(self) -> Iterator[list[Pair]]:
        """Yield weights that have a gradient and their copies, as many on one device as are copied at once."""
        stepped = [pair for pair in zip(self.weights, self.copies, strict=True) if pair[0].grad is not None]
        sizes = [local(weight).numel() for weight, _ in stepped]
        most = sum(sizes) if self.on_host else max([sum(sizes) // PARTS, LEAST, *sizes])
        part: list[Pair] = []
        held = 0
        for pair, size in zip(stepped, sizes, strict=True):
            if part and (held + size > most or pair[0].device != part[0][0].device):
                yield part
                part, held = [], 0
            part.append(pair)
            held += size
        if part:
            yield part

    def _step_copies(self, part: list[Pair], seed: Tensor | None, first: int) -> None:
        """Step weights by way of float32 copies: those that stay, or new ones that are rounded at random by `seed`."""
        for weight, copy in part:
            if not self.keeps:
                copy.data = weight.detach().float()
            assert weight.grad is not None
            copy.grad = weight.grad.to(copy.device, torch.float32, non_blocking=True)
        if self.on_host:  # gradients are here, and the weights of the step before are there
            synchronize(part[0][0].device)
        self.inner.step()  # of those that have a gradient
        if seed is None:
            for weight, copy in part:
                weight.copy_(copy, non_blocking=True)
        else:
            round_into(part, seed, first)
        for _, copy in part:
            copy.grad = None
        self._release(part)

    @property
    def fused_inner(self) -> AdamW | None:
        """The inner optimiser if it can step by the weights' own gradients: masters, which it rounds into the weights,
        or the weights, rounded at random or with the rest in their moments."""
        return self.inner if not self.on_host and isinstance(self.inner, AdamW) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the weights' gradients; those of the copies live within a step only."""
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Put the masters in place of the weights, which are float32 by now; without masters do nothing."""
        for weight, copy in zip(self.weights, self.copies, strict=True) if self.in_moments else ():
            if state := self.inner.state.get(copy):
                restore_masters_(local(weight), local(state["exp_avg"]), local(state["exp_avg_sq"]))
        if self.keeps:
            for weight, copy in zip(self.weights, self.copies, strict=True):
                weight.copy_(copy)

    def forget(self) -> None:
        """Let masters and states go, when no step follows."""
        self.state.clear()
        self.inner.state.clear()
        for copy in self.copies:
            copy.data = copy.data.new_empty(0)

    def state_dict(self) -> dict[str, Any]:
        masters = [copy.detach() for copy in self.copies] if self.keeps else []
        return {"inner": self.inner.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for copy, master in zip(self.copies, state_dict["masters"], strict=self.keeps):
            copy.copy_(master)
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups

    def _copy_of(self, weight: Tensor) -> Tensor:
        """Return a float32 copy of a weight, or the memory of one that is float32 and about to be narrowed."""
        if not self.on_host:
            return weight.detach().float()
        copy = torch.empty(weight.shape, dtype=torch.float32, pin_memory=weight.is_cuda)
        return copy.copy_(weight.detach())

    def _release(self, part: list[Pair]) -> None:
        """Give the memory of copies back that are made anew at the next step."""
        if not self.keeps:
            for _, copy in part:
                copy.data = copy.data.new_empty(0)


def round_into(part: Sequence[Pair], seed: Tensor, first: int) -> None:
    """Round copies into their weights, bfloat16, at random by `seed`, [] int64, as tensors number `first` and on."""
    weights, copies = ([local(x.detach()) for x in column] for column in zip(*part, strict=True))
    outs = [w if w.is_contiguous() else w.contiguous() for w in weights]
    xs, seed = [x.contiguous() for x in copies], seed.to(outs[0].device)
    if is_capturing(outs[0]):
        reference_stochastic_round(xs, outs, seed, first)
    else:
        stochastic_round(xs, outs, seed, first=first)
    for weight, out in zip(weights, outs, strict=True):
        if out is not weight:
            weight.copy_(out)


def restore_masters_(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    """Put the master that moments keep the rest of in the place of a float32 weight, a part of it at a time: whole
    tensors on the way would take more memory than a step."""
    flat, *moments = (x.detach().contiguous().view(-1) for x in (weight, exp_avg, exp_avg_sq))
    for start, stop in chunks(flat.numel(), flat.device):
        flat[start:stop] = unpack_masters(flat[start:stop], *(x[start:stop] for x in moments))
    if not weight.is_contiguous():
        weight.copy_(flat.view(weight.shape))


def clipping_step(optimizer: torch.optim.Optimizer) -> AdamW | None:
    """Return the optimiser whose next step multiplies gradients by a clip as its kernel reads them, if there is one."""
    inner = optimizer.fused_inner if isinstance(optimizer, MasterWeights) else optimizer
    if not isinstance(inner, AdamW):
        return None
    first = next((p for group in inner.param_groups for p in group["params"]), None)
    return inner if first is not None and has_kernel("adamw_step", first) else None
