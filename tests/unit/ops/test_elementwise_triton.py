"""The Triton kernels of norms, RoPE, SwiGLU and dropout against float64.

On a GPU in all dtypes and at large sizes; without one in Triton's interpreter, by `tests/ops/test_units_in_the_interpreter.py`.
Everything that is allocated and not written is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.ops.layer_norm import add_layer_norm, layer_norm
from caramba.ops.lion import lion_step
from caramba.ops.norm_dropout_activation import norm_dropout_activation
from caramba.ops.philox import LEVELS, dropout_mask, rare_bound, resolve_probability
from caramba.ops.rms_norm import add_rms_norm, rms_norm
from caramba.ops.rope import rope
from caramba.ops.swiglu import swiglu
from tests.unit.ops.kernel_device import DEVICE, HAS_GPU, RUNS_KERNELS, attached_kernels

pytestmark = RUNS_KERNELS
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
SHAPES = [(2, 3, 33), (64,), (1, 1), (0, 8), (3, 300)]
LARGE = [(4099, 2048), (300, 16384), (37, 20000), (9, 65536), (70001, 64), (2**16 + 1, 5)] if HAS_GPU else []


@pytest.fixture(autouse=True, scope="module")
def attached() -> Iterator[None]:
    yield from attached_kernels("rms_norm", "layer_norm", "norm_dropout_activation", "rope", "swiglu", "lion")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to(DEVICE).requires_grad_()


def compare(
    ours: Callable[..., Any],
    want: Callable[..., Any],
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype,
    slope_error: float = 0.0,
) -> None:
    """Outputs and gradients of `ours` against those of `want` on the same inputs in float64.

    An activation whose slope is off by `slope_error` moves a gradient summed over rows by about that share of it.
    """
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    outs, wants = ((y,) if isinstance(y, Tensor) else y for y in (ours(*inputs), want(*wide)))
    # Sums over many rows hold the rounding of every term in fp32, and each output one rounding to its dtype.
    eps = torch.finfo(dtype).eps
    grads = [drawn(*y.shape, seed=11 + at, dtype=dtype).detach() for at, y in enumerate(outs)]
    got = torch.autograd.grad(outs, inputs, grads)
    expected = torch.autograd.grad(wants, wide, [grad.double() for grad in grads])
    for ours_, want_ in zip((*outs, *got), (*wants, *expected), strict=True):
        assert ours_.shape == want_.shape
        assert ours_.isfinite().all()
        if want_.numel():
            scale = want_.abs().amax()
            bound = 2 * eps * want_.abs() + (2e-5 + slope_error) * scale + 1e-7
            # A residual's sum is rounded before it is normalised, which moves the rest by about one more unit.
            bound = bound + (2 * eps * scale if len(outs) == 2 else 0)
            worst = ((ours_.double() - want_).abs() / bound).amax()
            assert worst <= 1, f"{tuple(ours_.shape)}: error is {float(worst):.2f} of the bound"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE])
def test_norms(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = drawn(*shape, dtype=dtype), drawn(*shape, seed=1, dtype=dtype)
    weight, bias = drawn(shape[-1], seed=2), drawn(shape[-1], seed=3, dtype=dtype)
    width = shape[-1:]
    compare(lambda x, w: rms_norm(x, w, 1e-3), lambda x, w: F.rms_norm(x, width, w, 1e-3), (x, weight), dtype)
    compare(lambda x: rms_norm(x, None, 1e-3), lambda x: F.rms_norm(x, width, None, 1e-3), (x,), dtype)
    compare(
        lambda x, w, b: layer_norm(x, w, b, 1e-3),
        lambda x, w, b: F.layer_norm(x, width, w, b, 1e-3),
        (x, weight, bias),
        dtype,
    )
    compare(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-3),
        lambda x, r, w: (F.rms_norm(x + r, width, w, 1e-3), x + r),
        (x, residual, weight),
        dtype,
    )
    compare(
        lambda x, r, w: add_layer_norm(x, r, w, None, 1e-3),
        lambda x, r, w: (F.layer_norm(x + r, width, w, None, 1e-3), x + r),
        (x, residual, weight),
        dtype,
    )


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *(((5, 48), torch.float16), ((2, 3, 33), torch.float32), ((0, 8), torch.float16)),
        *((shape, dtype) for shape in ((32, 64), *LARGE) for dtype in DTYPES if HAS_GPU),
    ],
)
def test_dropout_drops_what_the_reference_drops(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight, bias = (
        drawn(*shape, dtype=dtype),
        drawn(shape[-1], seed=2),
        drawn(shape[-1], seed=3, dtype=dtype),
    )
    rows = x.shape[:-1].numel()
    for f, plain, seed, p in (
        ("relu", F.relu, 1, 0.3),
        ("gelu", F.gelu, 0, 0.0),
        ("gelu", F.gelu, 7, 0.5),
        ("silu", F.silu, 2**61 + 12345, 0.7),
    ):
        if f == "relu" and x.numel() > 10_000:
            continue  # among so many some lie so near 0 that fp32 and float64 differ on the side
        mask = dropout_mask(seed, p, rows, shape[-1], x.device).view(x.shape)
        compare(
            lambda x, w, b, f=f, p=p, seed=seed: norm_dropout_activation(
                x, w, b, activation=f, eps=1e-3, p=p, seed=seed
            ),
            lambda x, w, b, plain=plain, p=p, mask=mask: plain(
                F.layer_norm(x, shape[-1:], w, b, 1e-3) * mask / (1 - resolve_probability(p))
            ),
            (x, weight, bias),
            dtype,
            1.3e-4 if f == "gelu" and dtype == torch.bfloat16 else 0.0,  # of the fitted tail, see below
        )
    lifted = x.new_full(shape[-1:], 10.0, dtype=torch.float32)  # no normalised element comes out at 0 by itself
    y = norm_dropout_activation(x.detach().float(), bias=lifted, activation="silu", p=p, seed=seed)
    assert torch.equal(y != 0, mask)


def test_kernels_take_the_bound_of_the_reference() -> None:
    from caramba.kernels.triton.norm_dropout_activation import _few

    assert all(_few(n / LEVELS) == rare_bound(n / LEVELS) for n in range(LEVELS + 1))


@pytest.mark.parametrize("dtype", DTYPES if HAS_GPU else DTYPES[1:])
@pytest.mark.parametrize(("rows", "width"), [(13, 2048), (27, 800), (170, 96)])
def test_programs_take_several_tiles_of_which_they_ask_for_the_next(
    rows: int, width: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from caramba.kernels.triton import norm
    from caramba.kernels.triton import norm_dropout_activation as launcher

    x, weight, bias = drawn(rows, width, dtype=dtype), drawn(width, seed=2), drawn(width, seed=3)
    monkeypatch.setattr(norm, "_counts", {x.device: 1})
    for plans in ("_forwards", "_backwards"):
        monkeypatch.setattr(launcher, plans, type(launcher._forwards)())
    mask = dropout_mask(11, 0.4, rows, width, x.device)
    compare(
        lambda x, w, b: norm_dropout_activation(x, w, b, activation="silu", eps=1e-3, p=0.4, seed=11),
        lambda x, w, b: F.silu(F.layer_norm(x, (width,), w, b, 1e-3) * mask / (1 - resolve_probability(0.4))),
        (x, weight, bias),
        dtype,
    )
    (plan,) = launcher._forwards.by_form.values()
    assert plan[1] is not None
    tiles = -(-rows // norm.tile(width)[0])
    assert 2 * plan[1].grid[0] <= tiles, "a program has a next tile"


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_gelu_of_every_number_of_16_bits_is_within_one_unit(dtype: torch.dtype) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=DEVICE).to(torch.int16)
    every = bits.view(dtype).float()
    every = every[(every.abs() > 2**-10) & (every.abs() < 40)][:: 1 if HAS_GPU else 29].requires_grad_()
    # Rows of zeros are normalised to zeros, so that the bias is what the activation sees.
    rows = torch.zeros(1, len(every), dtype=dtype, device=DEVICE)
    y = norm_dropout_activation(rows, bias=every, activation="gelu")
    (ours,) = torch.autograd.grad(y.sum(), every)
    wide = every.detach().double().requires_grad_()
    # 0.5 x erfc(-x / sqrt(2)), which unlike 1 + erf keeps its digits far out.
    exact = 0.5 * wide * torch.special.erfc(-wide * 0.5**0.5)
    (want,) = torch.autograd.grad(exact.sum(), wide)
    assert (ours - want).abs().max() <= {torch.bfloat16: 1.3e-4, torch.float16: 3e-6}[dtype]
    exact = exact.detach()
    unit = torch.finfo(dtype).eps * 2.0 ** exact.abs().clamp(min=torch.finfo(dtype).tiny).log2().floor()
    error = (y[0].double() - exact).abs()
    far = wide < -5.5
    assert (error / unit)[~far].max() <= (0.57 if dtype == torch.bfloat16 else 0.52)  # 0.5 is rounding alone
    assert error[far].max() <= 1e-7


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_rope(groups: int, dtype: torch.dtype) -> None:
    for tokens, width in ((7, 20), (0, 8), *([(3001, 64), (1025, 128)] if HAS_GPU else [])):
        heads_inner = drawn(3, tokens, 4, width, dtype=dtype).detach().transpose(1, 2).requires_grad_()
        tokens_inner = drawn(3, 4, tokens, width, dtype=dtype)
        part = drawn(3, 4, tokens, width + 8, dtype=dtype).detach()[..., :width].requires_grad_()
        other = drawn(3, 4, width, tokens, dtype=dtype).detach().transpose(2, 3).requires_grad_()
        for x in (heads_inner, tokens_inner, part, other):
            for rows in ((), (3,)) if x is heads_inner else ((),):
                angles = drawn(*rows, groups, tokens, width // 2, seed=5).detach() * 9
                cos, sin = angles.cos(), angles.sin()

                def want(x: Tensor, cos: Tensor = cos, sin: Tensor = sin) -> Tensor:
                    c, s = (
                        table.double().repeat_interleave(4 // groups, -3).repeat(*(1,) * (table.dim() - 1), 2)
                        for table in (cos, sin)
                    )
                    first, second = x.chunk(2, -1)
                    return (x * c + torch.cat((-second, first), -1) * s) * 0.25

                compare(lambda x, cos=cos, sin=sin: rope(x, cos, sin, 0.25), want, (x,), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype: torch.dtype) -> None:
    large = [(1023, 8200), (3, 1000003)] if HAS_GPU else []
    for shape in ((2, 3, 33), (0, 8), (2, 2500), *large):
        gate, up = drawn(*shape, dtype=dtype), drawn(*shape, seed=1, dtype=dtype)
        compare(swiglu, lambda gate, up: F.silu(gate) * up, (gate, up), dtype)
        moved = gate.detach().transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
        compare(swiglu, lambda gate, up: F.silu(gate) * up, (moved, up), dtype)
        packed = drawn(*shape[:-1], 2 * shape[-1], dtype=dtype)
        compare(swiglu, lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (packed,), dtype)


def test_eager_calls_go_straight_to_the_launcher_with_the_bits_and_gradients_of_the_op() -> None:
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    x, weight = drawn(4, 64), drawn(64, seed=1)
    heads, cos = x.detach().view(1, 2, 4, 32), drawn(1, 4, 16, seed=2).detach()
    calls: dict[str, Callable[[], Any]] = {
        "rms_norm": lambda: rms_norm(x, weight),
        "add_layer_norm": lambda: add_layer_norm(x, x, weight)[0],
        "rope": lambda: rope(heads.requires_grad_(), cos, cos),
        "swiglu": lambda: swiglu(x, x),
        "swiglu_packed": lambda: swiglu(x),
        "norm_dropout_activation": lambda: norm_dropout_activation(x, weight, activation="silu", p=0.5, seed=1),
    }
    for op, call in calls.items():
        names: list[str] = []
        with Seen():
            by_op = call()
            wanted = torch.autograd.grad(by_op.square().sum(), heads if op == "rope" else x)[0]
        assert f"caramba.{op}.default" in names, "a mode sees the op"
        straight = call()
        assert f"{op}_eager" in str(straight.grad_fn)
        gradient = torch.autograd.grad(straight.square().sum(), heads if op == "rope" else x)[0]
        with torch.no_grad():
            without = call()
        assert not without.requires_grad
        for got, want in ((straight, by_op), (without, by_op), (gradient, wanted)):
            assert torch.equal(got, want)
    squared = x.square().sum()
    with torch.no_grad():
        lion_step([x], [torch.zeros_like(x)], [torch.ones_like(x)], lr=0.1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_rows_beyond_registers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of 65537 elements, expected at most 65536; use kernels: reference"):
        rms_norm(drawn(1, 65537))


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_a_graph_replays_every_kernel_on_new_values() -> None:
    x, weight = drawn(64, 512).detach(), drawn(512, seed=1).detach()
    angles = drawn(1, 64, 32, seed=2).detach()

    def work() -> Tensor:
        y, total = add_rms_norm(x, x, weight)
        turned = rope(y.view(1, 64, 8, 64).transpose(1, 2), angles.cos(), angles.sin())
        return swiglu(turned.transpose(1, 2).reshape(64, 512)) + layer_norm(total)[:, :256]

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    x.copy_(drawn(64, 512, seed=7).detach())
    graph.replay()
    assert torch.equal(out, work())
