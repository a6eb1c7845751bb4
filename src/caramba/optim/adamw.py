"""AdamW in one pass over weights, gradients and states, where a kernel for it is attached."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from caramba.errors import ConfigError
from caramba.ops import has_kernel
from caramba.ops.adamw import adamw_step, reference_adamw_step
from caramba.optim.groups import PLAIN, call_closure, is_sharded, local

NARROW_ENOUGH = (torch.float32, torch.float16, torch.bfloat16)
Masters = Mapping[nn.Parameter, nn.Parameter]


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW with the step taken by `adamw_step`, within rounding of torch's and states of the same form.

    Where the op has no kernel, in float64, for tensors that are not dense in order or of more than one kind of shards,
    and while a CUDA graph is captured, torch's own kernels take the step. `grad_scale` and `found_inf`, which a
    GradScaler sets, hold as in torch, but that gradients are left as they were.

    Attributes:
        clip: [] fp32, by which the next step, and no other, multiplies every gradient. None: by nothing.

    Raises:
        ConfigError: amsgrad, whose largest second moment the step does not keep.

    Reference: Loshchilov and Hutter, 2019, arXiv:1711.05101.
    """

    clip: Tensor | None = None

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
    ) -> None:
        if amsgrad:
            raise ConfigError(
                "adamw: amsgrad=True, expected False: the step keeps two moments and no largest one; use "
                "torch.optim.AdamW for it"
            )
        options: dict[str, Any] = {"weight_decay": weight_decay, "maximize": maximize, "fused": True}
        super().__init__(params, lr=lr, betas=betas, eps=eps, **options)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return what `closure`, run first, returns."""
        loss = call_closure(closure)
        clip, self.clip = self.clip, None
        for group in self.param_groups:
            pairs = [(p, grad) for p in group["params"] if (grad := p.grad) is not None]
            if not pairs:
                continue
            stepped, grads = (list(column) for column in zip(*pairs, strict=True))
            if is_capturing(stepped[0]) or not all(can_step(p, grad, self.state.get(p)) for p, grad in pairs):
                self._step_as_torch(group, stepped, grads, clip)
            else:
                self._step(group, stepped, grads, [], clip)
        return loss

    def take_clip(self, scale: Tensor) -> None:
        """Multiply the gradients of the next step by `scale`, []."""
        self.clip = scale

    def takes(self, weights: Masters) -> bool:
        """Whether `step_masters` can step these masters by the gradients of their weights."""
        return not any(map(is_capturing, list(weights)[:1])) and all(
            can_step(p, grad, self.state.get(p)) and can_step(weight, grad)
            for p, weight in weights.items()
            if (grad := weight.grad) is not None
        )

    def step_masters(self, weights: Masters) -> None:
        """Update each float32 master by its weight's gradient, and round it to nearest into the weight."""
        self._step_weights(weights)

    def supports_stochastic_rounding(self, weights: Masters) -> bool:
        """Whether `step_stochastic_rounding` can step these weights by a kernel.

        Without one, torch's fused step on copies of some weights at a time is faster than the op's reference in chunks.
        """
        return not any(map(is_capturing, list(weights)[:1])) and all(
            weight.dtype == torch.bfloat16 and can_step(weight, grad, self.state.get(p))
            for p, weight in weights.items()
            if (grad := weight.grad) is not None
        )

    def step_stochastic_rounding(self, weights: Masters, seed: Tensor) -> None:
        """Update bfloat16 `weights` with stochastic rounding by `seed`, [] int64.

        Keys are the optimiser's parameters: their groups and states are used, their values are not read.
        """
        self._step_weights(weights, seed)

    def step_packed_masters(self, weights: Masters) -> None:
        """Update bfloat16 `weights` whose float32 masters have their low bits packed into the moments.

        Keys are the optimiser's parameters: their groups and states are used, their values are not read. Without a
        kernel, and during CUDA graph capture, the op's reference takes the step.
        """
        self._step_weights(weights, in_moments=True)

    @torch.no_grad()
    def _step_weights(self, weights: Masters, seed: Tensor | None = None, *, in_moments: bool = False) -> None:
        clip, self.clip = self.clip, None
        first = 0
        for group in self.param_groups:
            stepped = [p for p in group["params"] if weights[p].grad is not None]
            held = [weights[p] for p in stepped]
            grads = [weight.grad for weight in held]
            self._step(group, stepped, grads, held, clip, seed, first, in_moments)
            first += len(stepped)

    def _step(
        self,
        group: dict[str, Any],
        stepped: list[Any],
        grads: list[Any],
        weights: list[Any],
        clip: Tensor | None,
        seed: Tensor | None = None,
        first: int = 0,
        in_moments: bool = False,
    ) -> None:
        """Step parameters, the masters of weights if there are any; with `seed` or `in_moments` the weights instead of
        them."""
        by_device: dict[torch.device, list[tuple[Tensor, ...]]] = {}
        for p, grad, weight in zip(stepped, grads, weights or stepped, strict=True):
            target = p if seed is None and not in_moments else weight
            state = self._state_of(p, target)
            row = (target, state["exp_avg"], state["exp_avg_sq"], state["step"], grad, weight)
            if is_sharded(target):
                row = tuple(local(x) for x in row)
            by_device.setdefault(row[0].device, []).append(row)
        for device, rows in by_device.items():
            own = [list(column) for column in zip(*rows, strict=True)]
            own[4] = [grad if grad.is_contiguous() else grad.contiguous() for grad in own[4]]
            settings = self._values(group, device, clip)
            if in_moments:
                _step_dense(own[:5], settings)
            elif seed is None:
                adamw_step(*own[:5], weights=own[5] if weights else [], **settings)
            else:
                adamw_step(*own[:5], seed=seed.to(device), first=first, **settings)
                first += len(rows)

    def _values(self, group: dict[str, Any], device: torch.device, clip: Tensor | None) -> dict[str, Any]:
        scales = {
            "clip": clip,
            "grad_scale": _given(self, "grad_scale"),
            "found_inf": _given(self, "found_inf"),
        }
        lr = group["lr"]
        return {
            "lr": on(device, lr) if isinstance(lr, Tensor) else lr,
            "beta1": float(group["betas"][0]),
            "beta2": float(group["betas"][1]),
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
            **{name: None if value is None else on(device, value) for name, value in scales.items()},
        }

    def _state_of(self, p: Tensor, like: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(like, dtype=p.dtype, memory_format=torch.preserve_format)
        return state

    def _step_as_torch(self, group: dict[str, Any], stepped: list[Any], grads: list[Any], clip: Tensor | None) -> None:
        states = [self._state_of(p, p) for p in stepped]
        if clip is not None:
            torch._foreach_mul_([local(grad) for grad in grads], clip)  # pyright: ignore[reportPrivateImportUsage]
        # Not through the class's own step, around which torch would run the hooks a second time.
        adamw(  # pyright: ignore[reportCallIssue] what is unpacked
            stepped,
            grads,
            *([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq")),
            *([], [state["step"] for state in states]),
            foreach=False,
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
            grad_scale=_given(self, "grad_scale"),
            found_inf=_given(self, "found_inf"),
        )


def _step_dense(columns: list[list[Tensor]], settings: dict[str, Any]) -> None:
    """Step packed masters; tensors that are not contiguous are stepped through copies."""
    held, rest = columns[:3], columns[3:]
    dense = [[x.contiguous() for x in xs] for xs in held]
    given: list[Any] = [*dense, *rest]
    if any(map(is_capturing, held[0][:1])):
        lr = settings["lr"]
        rate = (lr, None) if not isinstance(lr, Tensor) else (0.0, lr)
        numbers = [settings[name] for name in ("beta1", "beta2", "eps", "weight_decay", "maximize")]
        scales = [settings[name] for name in ("clip", "grad_scale", "found_inf")]
        given += [[], rate[0], *numbers, rate[1], *scales]
        reference_adamw_step(*given, in_moments=True)
    else:
        adamw_step(*given, in_moments=True, **settings)
    for xs, copies in zip(held, dense, strict=True):
        for x, copy in zip(xs, copies, strict=True):
            if copy is not x:
                x.copy_(copy)


def can_step(p: Tensor, grad: Any, state: Mapping[str, Any] | None = None) -> bool:
    """True if `adamw_step` has a kernel for a parameter, its gradient and its state, with their current layout."""
    held = (p, state["exp_avg"], state["exp_avg_sq"]) if state else (p,)
    if type(p) not in PLAIN or type(grad) not in PLAIN:
        sharded: Any = (*held, grad)
        if not all(is_sharded(x) and x.placements == sharded[0].placements for x in sharded):
            return False
        held, grad = tuple(local(x) for x in held), local(grad)
    if not has_kernel("adamw_step", held[0]) or grad.dtype not in NARROW_ENOUGH:
        return False
    device = held[0].device
    return all(x.dtype in NARROW_ENOUGH and x.device == device and x.is_contiguous() for x in held)


def is_capturing(p: Tensor) -> bool:
    """True during CUDA graph capture, which would record addresses that are looked up at each step."""
    return p.is_cuda and torch.cuda.is_current_stream_capturing()


def on(device: torch.device, value: Tensor) -> Tensor:
    """Return a scalar tensor on a device in float32, without a copy if it is that already."""
    return value.detach().to(device, torch.float32, non_blocking=True)


def _given(optimizer: torch.optim.Optimizer, name: str) -> Tensor | None:
    """Return an attribute that GradScaler sets on the optimiser for its step, or None."""
    return getattr(optimizer, name, None)
