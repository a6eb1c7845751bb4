"""Products of float8 numbers: exact where float8 holds the numbers, within its error elsewhere, joined and padded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from caramba.config.layer import SwiGLULayerConfig
from caramba.errors import ConfigError
from caramba.lower import fuse_training
from caramba.lower.float8 import Float8Linear, Float8Recipe, RecipeName
from caramba.lower.fuse_training import are_joinable, products
from caramba.lower.lowering import lower
from caramba.model.topology import build_node
from caramba.ops import backend
from caramba.ops.float8_cast import float8_cast, float8_swiglu, float8_swiglu_backward

RECIPES: tuple[RecipeName, ...] = ("rowwise", "tensorwise")


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of a device with the kernel; what casts is the reference."""
    monkeypatch.setitem(backend._attached, ("float8_cast", "cpu"), "triton")


def drawn(*shape: int, seed: int, is_exact: bool) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if is_exact:
        return torch.randint(-2, 3, shape, generator=generator).double()
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients of input and parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y, (x, *layer.parameters()), grad.to(y.dtype))]


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_its_plain_one_but_for_the_rounding(recipe: RecipeName, is_exact: bool) -> None:
    # Three rows of ten tokens are no multiple of 16: they are padded.
    x, grad = (drawn(3, 10, width, seed=width, is_exact=is_exact) for width in (48, 32))
    plain = nn.Linear(48, 32).double()
    with torch.no_grad():
        plain.weight.copy_(drawn(32, 48, seed=1, is_exact=is_exact))
        plain.bias.copy_(drawn(32, seed=2, is_exact=is_exact))
    want = gradients(plain, x, grad)
    plain.bfloat16()
    layer = Float8Linear(plain, Float8Recipe(recipe, "cpu"))
    assert dict(layer.named_parameters()) == dict(plain.named_parameters())
    for ours, exact in zip(gradients(layer, x.bfloat16(), grad), want, strict=True):
        assert ours.dtype == torch.bfloat16
        if is_exact:  # sums of small integers, which bfloat16 holds as well
            # Some processors leave 1e-6 of a zero, as they add the bias before the last rounding.
            torch.testing.assert_close(ours.double(), exact, rtol=0, atol=1e-5)
        else:  # two factors with 3 bits of mantissa, or 2 for gradients of one scale
            assert (ours.double() - exact).norm() < 0.08 * exact.norm()
            assert not torch.equal(ours, exact.bfloat16()) or ours.dim() == 1


def test_scales_of_rows_keep_what_one_scale_loses() -> None:
    x = torch.ones(32, 48) * torch.logspace(-5, 5, 32)[:, None]
    for per_tensor, least in ((False, 1.0), (True, 0.0)):
        rows, row_scale, columns, column_scale = float8_cast(x, per_tensor=per_tensor)
        assert ((rows.float() * row_scale / x).amin() > 0.9) == bool(least)
        assert torch.equal((columns.float() * column_scale)[:, -1], (rows.float() * row_scale)[-1])
    assert torch.equal(rows.t(), columns)


def test_autocast_and_layers_of_one_input_cast_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    recipe = Float8Recipe("rowwise", "cpu")
    layers = [Float8Linear(nn.Linear(32, width, bias=False), recipe) for width in (32, 16)]
    x = torch.randn(4, 16, 32)
    seen: list[torch.Size] = []

    def counted(x: Tensor, *rest: bool) -> tuple[Tensor, ...]:
        seen.append(x.shape)
        return float8_cast(x, per_tensor=rest[0] if rest else False)

    monkeypatch.setattr("caramba.lower.float8.float8_cast", lambda x, **_: counted(x))
    with torch.autocast("cpu", torch.bfloat16):
        apart = [layer(x) for layer in layers]
        n_apart, seen[:] = len(seen), []
        monkeypatch.setattr(fuse_training, "MIN_ROWS", 1)
        together = products(x, layers)
        assert together is not None
        assert (n_apart, [tuple(shape) for shape in seen]) == (4, [(64, 32), (48, 32)])
        other = Float8Linear(nn.Linear(32, 16, bias=False), Float8Recipe("tensorwise", "cpu"))
        assert are_joinable(layers)
        assert not are_joinable([layers[0], other])
    for one, joined in zip(apart, together, strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, joined)


def test_the_cast_says_what_it_takes_and_holds_its_contract() -> None:
    for x in (
        torch.ones(15, 16),
        torch.ones(16, 8),
        torch.ones(16, 16, dtype=torch.int32),
        torch.ones(0, 16),
    ):
        with pytest.raises(ConfigError, match=r"float8_cast: x is .* multiples of 16"):
            float8_cast(x)
    tests = ("test_schema", "test_faketensor")
    for per_tensor in (False, True):
        torch.library.opcheck(
            torch.ops.caramba.float8_cast.default, (torch.randn(16, 32), per_tensor, True), test_utils=tests
        )
        packed, scales = torch.randn(16, 64), (torch.ones(16, 1), torch.ones(32, 1))
        torch.library.opcheck(torch.ops.caramba.float8_swiglu.default, (packed, per_tensor), test_utils=tests)
        given = (torch.randn(16, 32), *scales, packed, per_tensor, per_tensor)
        torch.library.opcheck(torch.ops.caramba.float8_swiglu_backward.default, given, test_utils=tests)
    with pytest.raises(ConfigError, match=r"float8_swiglu: packed is .* multiples of 16 rows and 32 columns"):
        float8_swiglu(torch.ones(16, 48))
    with pytest.raises(ConfigError, match=r"grad is \(16, 16\) and packed \(16, 64\), expected \[M, F\]"):
        float8_swiglu_backward(torch.ones(16, 16), *scales, packed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_swiglu_as_one_function_is_its_parts(recipe: RecipeName, monkeypatch: pytest.MonkeyPatch) -> None:
    x, grad = (drawn(3, 10, 32, seed=seed, is_exact=False) for seed in (0, 1))
    found: list[list[Tensor]] = []
    for op in ("", "float8_swiglu", "float8_swiglu_backward"):
        if op:
            monkeypatch.setitem(backend._attached, (op, "cpu"), "triton")
        torch.manual_seed(0)
        layer = build_node(SwiGLULayerConfig(d_model=32, d_ff=48)).double()
        plain = gradients(layer, x, grad)
        layer.bfloat16()
        made = Float8Recipe(recipe, "cpu")
        for name in ("gate", "up", "down"):
            part = layer.get_submodule(name)
            assert isinstance(part, nn.Linear)
            layer.set_submodule(name, Float8Linear(part, made))
        assert made.has_swiglu == (op == "float8_swiglu_backward"), "both of its ops have a kernel, or it stays apart"
        with lower(layer, "cpu", "train"):
            found.append(gradients(layer, x.bfloat16(), grad))
        for ours, exact in zip(found[-1], plain, strict=True):
            assert (ours.double() - exact).norm() < 0.12 * exact.norm()
    apart, still, fused = found
    assert all(torch.equal(one, two) for one, two in zip(apart, still, strict=True))
    for one, two in zip(apart, fused, strict=True):
        assert 0 < (one - two).norm() < 0.08 * one.norm()  # one scale for all moves with every rounding of the largest
    layer.get_submodule("gate").register_forward_hook(lambda *_: None)  # whose layer has to be called
    with lower(layer, "cpu", "train"):
        again = gradients(layer, x.bfloat16(), grad)
    assert all(torch.equal(one, two) for one, two in zip(apart, again, strict=True))


def test_a_compiled_step_is_one_graph_with_three_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse_training, "MIN_ROWS", 1)
    torch.manual_seed(0)
    recipe = Float8Recipe("rowwise", "cpu")
    layers = [Float8Linear(nn.Linear(32, 16, bias=False).bfloat16(), recipe) for _ in range(2)]
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    x = torch.randn(16, 32, dtype=torch.bfloat16)
    weights = [layer.weight for layer in layers]

    def step(x: Tensor) -> Tensor:
        gate, up = products(x, layers) or ()
        return gate * up

    got, want = torch.compile(step, backend=record, fullgraph=True)(x), step(x)
    assert torch.equal(got, want)
    cast = torch.ops.caramba.float8_cast.default
    parts = [part for part in graphs[0].modules() if isinstance(part, torch.fx.GraphModule)]
    found = sum(node.target is cast for part in parts for node in part.graph.nodes)
    assert (len(graphs), found) == (1, 3), "x and the weights, and in the backward the gradient"
    ours, theirs = (torch.autograd.grad(y.sum(), weights, retain_graph=True) for y in (got, want))
    assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))
