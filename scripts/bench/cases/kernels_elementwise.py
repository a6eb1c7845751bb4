"""Cases of norms, RoPE, SwiGLU, dropout and Lion for kernels.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases.kernel_case import Case
from torch import Tensor

from caramba.ops.layer_norm import add_layer_norm, layer_norm
from caramba.ops.lion import lion_step
from caramba.ops.norm_dropout_activation import norm_dropout_activation
from caramba.ops.philox import dropout_mask
from caramba.ops.rms_norm import add_rms_norm, rms_norm
from caramba.ops.rope import rope
from caramba.ops.swiglu import swiglu

EPS, SEED, P = 1e-5, 12345, 0.1
LION = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}


def drawer(device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype).requires_grad_()

    return draw


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in plain torch, as a compiled model computes it."""
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def lion(w: Tensor, m: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Lion's update of one tensor in place, in plain torch."""
    wide, moment, slope = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (w, m, g))
    sign = torch.sign(moment * LION["beta1"] + slope * (1 - LION["beta1"]))
    w.copy_(wide * (1 - LION["lr"] * LION["weight_decay"]) - sign * LION["lr"])
    m.copy_(moment * LION["beta2"] + slope * (1 - LION["beta2"]))
    return w, m


def our_lion(w: Tensor, m: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    lion_step(list(w.unbind()), list(m.unbind()), list(g.unbind()), **LION)
    return w, m


def lion_of(stacked: tuple[Tensor, ...]) -> Callable[[], None]:
    lists = [list(x.unbind()) for x in stacked]
    return lambda: lion_step(*lists, **LION)


def norms(device: torch.device, dtype: torch.dtype, width: int) -> list[Case]:
    draw, size = drawer(device, dtype), dtype.itemsize * width
    rows = 2**26 // width

    def plain_sum(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
        def add_reference(x: Tensor, r: Tensor, *vectors: Tensor) -> tuple[Tensor, Tensor]:
            total = x + r
            return norm(total, *vectors), total

        return add_reference

    def rms(x: Tensor, w: Tensor) -> Tensor:
        return F.rms_norm(x, (width,), w, EPS)

    def layer(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), w, b, EPS)

    made = {
        "rms_norm": (lambda n: (draw(n, width), draw(width)), lambda x, w: rms_norm(x, w, EPS), rms, 2, 3),
        "add_rms_norm": (
            lambda n: (draw(n, width), draw(n, width), draw(width)),
            lambda x, r, w: add_rms_norm(x, r, w, EPS),
            plain_sum(rms),
            4,
            4,
        ),
        "layer_norm": (
            lambda n: (draw(n, width), draw(width), draw(width)),
            lambda x, w, b: layer_norm(x, w, b, EPS),
            layer,
            2,
            3,
        ),
        "add_layer_norm": (
            lambda n: (draw(n, width), draw(n, width), draw(width), draw(width)),
            lambda x, r, w, b: add_layer_norm(x, r, w, b, EPS),
            plain_sum(layer),
            4,
            4,
        ),
    }
    return [
        Case(
            name=f"{op} {width}",
            op=op,
            rows=rows,
            shape=f"{{rows}} x {width}",
            make=make,
            ours=ours,
            peer=peer,
            bytes_per_row=forward * size,
            backward_bytes_per_row=backward * size,
        )
        for op, (make, ours, peer, forward, backward) in made.items()
    ]


def others(device: torch.device, dtype: torch.dtype) -> list[Case]:
    draw = drawer(device, dtype)
    heads, width, d_ff, model = 32, 64, 8192, 2048

    def heads_of(n: int) -> tuple[Tensor, ...]:
        x = draw(1, n, heads, width).detach().transpose(1, 2).requires_grad_()
        angles = torch.arange(n, device=device)[:, None] * torch.logspace(0, -4, width // 2, device=device)
        return x, angles.cos()[None], angles.sin()[None]

    def drop(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.gelu(F.dropout(F.layer_norm(x, (model,), w, b, EPS), P))

    def drop_exact(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        """With the mask that the op draws."""
        mask = dropout_mask(SEED, P, x.shape[0], model, x.device)
        return F.gelu(F.layer_norm(x, (model,), w, b, EPS) * mask / (1 - P))

    def tensors_of(n: int) -> tuple[Tensor, ...]:
        return tuple(draw(n, 1024, 1024).detach() for _ in range(3))

    size = dtype.itemsize
    return [
        Case(
            "rope",
            "rope",
            32768,
            f"1 x {heads} x {{rows}} x {width}, heads inner",
            heads_of,
            rope,
            rotate,
            2 * heads * width * size,
            2 * heads * width * size,
            backward_must=0.88,
        ),
        Case(
            "swiglu",
            "swiglu",
            8192,
            f"{{rows}} x {d_ff}",
            lambda n: (draw(n, d_ff), draw(n, d_ff)),
            swiglu,
            lambda gate, up: F.silu(gate) * up,
            3 * d_ff * size,
            5 * d_ff * size,
            backward_must=0.88,
        ),
        Case(
            "swiglu packed",
            "swiglu_packed",
            8192,
            f"{{rows}} x 2 x {d_ff}",
            lambda n: (draw(n, 2 * d_ff),),
            swiglu,
            lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
            3 * d_ff * size,
            5 * d_ff * size,
            backward_must=0.88,
        ),
        Case(
            "norm, dropout, gelu",
            "norm_dropout_activation",
            32768,
            f"{{rows}} x {model}",
            lambda n: (draw(n, model), draw(model), draw(model)),
            lambda x, w, b: norm_dropout_activation(x, w, b, activation="gelu", eps=EPS, p=P, seed=SEED),
            drop,
            2 * model * size,
            3 * model * size,
            exact=drop_exact,
        ),
        Case(
            "lion",
            "lion_step",
            64,
            "{rows} tensors of 1024 x 1024",
            tensors_of,
            our_lion,
            lion,
            5 * 1024 * 1024 * size,
            host=lion_of,
        ),
    ]


def cases(device: torch.device, dtype: torch.dtype) -> list[Case]:
    """Every case; rows are those of the full size, of 64 MB and more."""
    return [*norms(device, dtype, 2048), *norms(device, dtype, 8192), *others(device, dtype)]
