"""The op `caramba::adamw_step`: AdamW for many tensors in place.

Variants: 16-bit weights below master weights, bfloat16 with stochastic rounding, and bfloat16 with the lower bits of
the float32 masters packed into the moments.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from caramba.errors import ConfigError
from caramba.ops.backend import caramba_op, direct, has_kernel, upcast
from caramba.ops.stochastic_round import check_seed, chunk_noise, chunks, round_with_noise

FIRST_BITS, SECOND_BITS = 11, 5
"""Of the first and of the second moment: a tenth of one changes in a step, and a thousandth or more of the other."""


def unpack_masters(weight: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Tensor:
    """Return the float32 masters of bfloat16 weights. Zero moments, as of a new optimiser, add no bits.

    Shape: one shape; weight bfloat16, or float32 that is rounded first; moments float32.
    """
    first = exp_avg.view(torch.int32).bitwise_and((1 << FIRST_BITS) - 1)
    second = exp_avg_sq.view(torch.int32).bitwise_and((1 << SECOND_BITS) - 1)
    rest = first.bitwise_left_shift_(SECOND_BITS).bitwise_or_(second)
    # Of the nearest bfloat16 the rest is up or down: from half a unit on the weight was rounded up.
    rest = rest.bitwise_xor_(1 << 15).sub_(1 << 15)
    return _nearest(weight.float()).view(torch.int32).add(rest).view(torch.float32)


def moments_of(exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor]:
    """Return the moments without the bits of the masters."""
    return _cleared(exp_avg, FIRST_BITS), _cleared(exp_avg_sq, SECOND_BITS)


def pack_masters(master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return bfloat16 weights of float32 masters, and the moments with the masters' lower bits.

    Rounds to nearest, halves away from zero.
    """
    rest = master.view(torch.int32).bitwise_and(0xFFFF)
    first = _rounded(exp_avg, FIRST_BITS).view(torch.int32)
    second = _rounded(exp_avg_sq, SECOND_BITS).view(torch.int32)
    return (
        _nearest(master).to(torch.bfloat16),
        first.bitwise_or(rest.bitwise_right_shift(SECOND_BITS)).view(torch.float32),
        second.bitwise_or(rest.bitwise_and((1 << SECOND_BITS) - 1)).view(torch.float32),
    )


def _nearest(x: Tensor) -> Tensor:
    """float32 with no more bits than bfloat16 has, halves away from zero: the rest then fits 16 bits with its sign."""
    return _rounded(x, 16)


def _rounded(x: Tensor, bits: int) -> Tensor:
    """x to the nearest float32 whose last `bits` are zero; NaN stays, which would carry over into the sign."""
    half = x.view(torch.int32).add(1 << (bits - 1)).view(torch.float32)
    return _cleared(torch.where(x.isnan(), x, half), bits)


def _cleared(x: Tensor, bits: int) -> Tensor:
    return x.view(torch.int32).bitwise_and(-(1 << bits)).view(torch.float32)


NAMES = ("parameter", "first moment", "second moment", "gradient", "weight")


def adamw_step(
    parameters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    grads: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    weights: Sequence[Tensor] = (),
    clip: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    seed: Tensor | None = None,
    first: int = 0,
    in_moments: bool = False,
) -> None:
    """Update parameters and moments in place, in at least fp32, each rounded to its own dtype once:

        t <- t + 1,  g <- g clip / grad_scale,  m <- m + (1 - beta1) (g - m),  v <- v + (1 - beta2) (g^2 - v)
        w <- (1 - lr weight_decay) w - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    `maximize` negates the gradient. With `weights` the parameters are master weights: each is rounded into its weight,
    and takes the gradient of that weight. With `seed` the parameters are bfloat16 with stochastic rounding, as in
    `stochastic_round` with the same `seed` and `first`. With `in_moments` they are the upper bits of float32 masters,
    whose lower bits are in the moments (`caramba.ops.adamw`). The masters are updated, and rounded to nearest
    into the parameters. Where `found_inf` is not 0, neither parameters nor steps change. The call does not synchronise
    with the device, and does not change gradients.

    Shape: lists of one length, `weights` of that length or empty; tensor i of each has one shape, is contiguous and on
    one device. steps [] each, fp32; lr, clip, grad_scale and found_inf hold one fp32 if they are tensors, seed one
    int64.

    Raises:
        ConfigError: lists or shapes that differ, tensors that are not contiguous or not floating, or more than one
            device; with `seed` or `in_moments` parameters that are not bfloat16, or weights, or both of the two; with
            `in_moments` moments that are not float32.

    Reference: Loshchilov and Hutter, 2019, arXiv:1711.05101; Zamirai et al., 2020, arXiv:2010.06192 (`seed`).
    """
    lists = [parameters, exp_avgs, exp_avg_sqs, grads, *([weights] if weights else [])]
    lengths = [len(listed) for listed in (*lists, steps)]
    if len(set(lengths)) != 1:
        raise ConfigError(
            f"adamw_step: {lengths} parameters, moments, gradients, weights and steps; expected as many of each"
        )
    if not parameters:
        return
    device, is_wide = parameters[0].device, False
    for index, group in enumerate(zip(*lists, strict=True)):
        shape = group[0].shape
        for x in group:
            if x.shape != shape or x.device != device or not (x.is_contiguous() and x.is_floating_point()):
                raise _refusal(index, group)
            is_wide = is_wide or x.dtype == torch.float64
    single = {"lr": lr, "clip": clip, "grad_scale": grad_scale, "found_inf": found_inf}
    numbers = [(name, x) for name, x in single.items() if isinstance(x, Tensor)]
    for name, x in (*numbers, *enumerate(steps)):
        if x.numel() != 1 or x.dtype != torch.float32 or x.device != device:
            raise ConfigError(
                f"adamw_step: {name if isinstance(name, str) else f'step {name}'} is {tuple(x.shape)} of {x.dtype} on "
                f"{x.device}; expected one float32 on {device}"
            )
    if seed is not None:
        check_seed("adamw_step", seed, device)
        kinds = sorted({str(p.dtype) for p in parameters})
        if weights or kinds != ["torch.bfloat16"]:
            raise ConfigError(
                f"adamw_step: parameters of {', '.join(kinds)} with {len(weights)} weights, and a seed; expected "
                "bfloat16 parameters without master weights; only these use stochastic rounding"
            )
    if in_moments:
        kinds = sorted({f"{p.dtype} with moments of {m.dtype}" for p, m in zip(parameters, exp_avgs, strict=True)})
        narrow = [m.dtype for m in (*exp_avgs, *exp_avg_sqs) if m.dtype != torch.float32]
        if weights or seed is not None or narrow or any(p.dtype != torch.bfloat16 for p in parameters):
            raise ConfigError(
                f"adamw_step: in_moments, and parameters of {', '.join(kinds)}, {len(weights)} weights and "
                f"{'no' if seed is None else 'a'} seed; expected bfloat16 parameters with float32 moments, no weights "
                "and no seed"
            )
    run: Any = None if torch.is_grad_enabled() else direct("adamw_step", *parameters)
    # No kernel takes float64; and the dispatcher keeps a launcher that `without_kernels` has set aside.
    is_plain = is_wide or not (has_kernel("adamw_step", parameters[0]) or torch.compiler.is_compiling())
    if is_plain:
        run = torch.no_grad()(reference_adamw_step)
    elif run is None:
        run = torch.ops.caramba.adamw_step.default
    else:  # as the op would, so that a backward through what has changed is refused
        torch.autograd.graph.increment_version((*parameters, *exp_avgs, *exp_avg_sqs, *steps, *weights))
    rate = lr if isinstance(lr, Tensor) else None
    run(
        *(list(listed) for listed in (parameters, exp_avgs, exp_avg_sqs, steps, grads, weights)),
        *(
            0.0 if rate is not None else float(lr),
            float(beta1),
            float(beta2),
            float(eps),
            float(weight_decay),
            maximize,
        ),
        *(rate, clip, grad_scale, found_inf, seed, first, in_moments),
    )


def _refusal(index: int, group: Sequence[Tensor]) -> ConfigError:
    first = group[0]
    wrong = [
        (name, x)
        for name, x in zip(NAMES, group, strict=False)
        if x.shape != first.shape or x.device != first.device or not (x.is_contiguous() and x.is_floating_point())
    ]
    name, x = wrong[0] if wrong else (NAMES[0], first)  # which is on another device than the tensors before
    return ConfigError(
        f"adamw_step: {name} {index} is {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}, on {x.device}; "
        f"expected contiguous floating {tuple(first.shape)}, all on one device"
    )


@caramba_op("adamw_step", mutates=("parameters", "exp_avgs", "exp_avg_sqs", "steps", "weights"))
def reference_adamw_step(
    parameters: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    grads: list[Tensor],
    weights: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    rate: Tensor | None,
    clip: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    seed: Tensor | None = None,
    first: int = 0,
    in_moments: bool = False,
) -> None:
    """Compute the op in plain PyTorch, in chunks to bound memory."""
    noise = None if seed is None else chunk_noise(seed, first, [p.numel() for p in parameters])
    for index, (p, m, v, step, grad) in enumerate(zip(parameters, exp_avgs, exp_avg_sqs, steps, grads, strict=True)):
        dtype = torch.promote_types(p.dtype, torch.float32)
        is_taken = torch.ones_like(step, dtype=torch.bool) if found_inf is None else found_inf == 0
        is_taken = is_taken.reshape(())
        step.add_(is_taken)
        t = step.to(dtype)
        r = lr if rate is None else rate.to(dtype).reshape(())
        # expm1: in float32, 1 - beta2^t has lost half of its digits at the first step.
        root = (-torch.expm1(t * log_of(beta2))).sqrt()
        size = r / -torch.expm1(t * log_of(beta1))
        flat = [x.view(-1) for x in (p, m, v, grad, *([weights[index]] if weights else []))]
        for start, stop in chunks(p.numel(), p.device):
            part = [x[start:stop] for x in flat]
            wide, moment, square, g = (upcast(x) for x in part[:4])
            if in_moments:
                wide, (moment, square) = unpack_masters(*part[:3]), moments_of(moment, square)
            g = -g if maximize else g
            g = g if clip is None else g * clip.reshape(())
            g = g if grad_scale is None else g / grad_scale.reshape(())
            moment = moment + (g - moment) * (1 - beta1)
            square = square + (g * g - square) * (1 - beta2)
            wide = wide * (1 - r * weight_decay) - size * moment / (square.sqrt() / root + eps)
            wide = wide if noise is None else round_with_noise(wide, next(noise))
            if in_moments:
                wide, moment, square = pack_masters(wide, moment, square)
            updated = [(part[0], wide), (part[1], moment), (part[2], square), *((w, wide) for w in part[4:])]
            for held, value in updated:
                held.copy_(value if found_inf is None else torch.where(is_taken, value, held.to(value.dtype)))


def log_of(beta: float) -> float:
    """Return log(beta), of 0 minus infinity: beta^t = exp(t log(beta)) for every t above 0."""
    return math.log(beta) if beta > 0 else -math.inf
