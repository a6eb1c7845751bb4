"""Float32 master weights on the device, on the host or packed into moments, and stochastic rounding."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from caramba.ops.adamw import unpack_masters
from caramba.ops.stochastic_round import chunks, reference_stochastic_round, stochastic_round
from caramba.optim.adamw import AdamW, is_capturing
from caramba.optim.groups import Named, call_closure, local, of_rank_0
from caramba.runtime import synchronize

PARTS, LEAST = 16, 2**24
"""Weights are copied in parts: a 1/PARTS share, the largest weight, or LEAST elements, whichever is largest."""
Pair = tuple[nn.Parameter, nn.Parameter]


class MasterWeights(torch.optim.Optimizer):
    """Steps weights in float32 with any optimiser, whose states are then float32 too.

    With `keeps` the copies (masters) persist and a weight is its master rounded to nearest, as in float32 training.
    Without it, weights use stochastic rounding: the expected weight is exact, so small updates are not lost, and only
    the states persist. AdamW's kernel reads and rounds the weights in place. Without that kernel, and for other
    optimisers, weights and gradients are copied for the step in parts, which bounds the extra memory.

    With `in_moments`, for AdamW only, the low bits of a master are stored in the last bits of the states
    (`caramba.ops.adamw`): masters take no memory, and a weight is its master rounded to nearest. The low bits
    of float32 weights at construction are lost.

    With `on_host` masters and states are in host memory and the step runs there: gradients are copied down and weights
    up once a step. `param_groups` are the inner optimiser's, over the copies. Rounding draws one number a step from
    torch's global generator of the device, which a run seeds and saves; all ranks use rank 0's, so that replicas stay
    equal.

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
        loss = call_closure(closure)
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
        """Yield parts of the weights that have a gradient, with their copies; a part is on one device."""
        stepped = [pair for pair in zip(self.weights, self.copies, strict=True) if pair[0].grad is not None]
        sizes = [local(weight).numel() for weight, _ in stepped]
        most = sum(sizes) if self.on_host else max([sum(sizes) // PARTS, LEAST, *sizes])
        part: list[Pair] = []
        part_size = 0
        for pair, size in zip(stepped, sizes, strict=True):
            if part and (part_size + size > most or pair[0].device != part[0][0].device):
                yield part
                part, part_size = [], 0
            part.append(pair)
            part_size += size
        if part:
            yield part

    def _step_copies(self, part: list[Pair], seed: Tensor | None, first: int) -> None:
        """Step weights through float32 copies: masters, or temporary ones rounded stochastically by `seed`."""
        for weight, copy in part:
            if not self.keeps:
                copy.data = weight.detach().float()
            assert weight.grad is not None
            copy.grad = weight.grad.to(copy.device, torch.float32, non_blocking=True)
        if self.on_host:  # wait for the copies of gradients and of the previous step's weights
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
        """The inner AdamW if it can step from the weights' own gradients without copies, else None.

        It then steps masters, stochastically rounded weights, or packed masters.
        """
        return self.inner if not self.on_host and isinstance(self.inner, AdamW) else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the weights' gradients; those of the copies exist within a step only."""
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def restore(self) -> None:
        """Copy the masters into the weights, which must be float32; without masters do nothing."""
        for weight, copy in zip(self.weights, self.copies, strict=True) if self.in_moments else ():
            if state := self.inner.state.get(copy):
                restore_masters_(local(weight), local(state["exp_avg"]), local(state["exp_avg_sq"]))
        if self.keeps:
            for weight, copy in zip(self.weights, self.copies, strict=True):
                weight.copy_(copy)

    def forget(self) -> None:
        """Free masters and states after the last step."""
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
        if not self.on_host:
            return weight.detach().float()
        copy = torch.empty(weight.shape, dtype=torch.float32, pin_memory=weight.is_cuda)
        return copy.copy_(weight.detach())

    def _release(self, part: list[Pair]) -> None:
        if not self.keeps:
            for _, copy in part:
                copy.data = copy.data.new_empty(0)


def round_into(part: Sequence[Pair], seed: Tensor, first: int) -> None:
    """Round copies stochastically into bfloat16 weights by `seed`, [] int64, as tensors `first` and following."""
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
    """Rebuild float32 masters in place from moment bits, in chunks to bound memory."""
    flat, *moments = (x.detach().contiguous().view(-1) for x in (weight, exp_avg, exp_avg_sq))
    for start, stop in chunks(flat.numel(), flat.device):
        flat[start:stop] = unpack_masters(flat[start:stop], *(x[start:stop] for x in moments))
    if not weight.is_contiguous():
        weight.copy_(flat.view(weight.shape))
