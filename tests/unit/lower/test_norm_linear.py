"""Decode steps by products of few rows: the same numbers as by the layers, and who keeps the layers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tests.unit.model.model_specs import VOCAB, transformer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.cache import DeviceContext, KVCacheKind
from caramba.config.benchmark import WeightFormat
from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.kernels import load
from caramba.layer import SwiGLULayer
from caramba.layer.quantized_linear import QuantizedLinear
from caramba.lower.fuse_linears import FusedLinear, fuse
from caramba.lower.lowering import lower
from caramba.lower.norm_linear import NormLinear, SmallBatchResidual
from caramba.lower.quantize import quantise_weights, quantize_int4
from caramba.model import Model, build_model
from caramba.model.topology import ResidualTopology
from caramba.ops import backend
from caramba.ops.small_batch_linear import SMALL_BATCH_ROWS, dequantize_int4, is_small_batch

NAMES = ["gqa_scaled", "bottleneck", "window", "decoupled", "decoupled_tie", "latent", "no_rope"]


class Ops(TorchDispatchMode):
    """How often which op ran."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference stands for a kernel of the CPU's."""
    monkeypatch.setitem(backend._attached, ("small_batch_linear", "cpu"), "triton")


def lively(name: str) -> Model:
    model = build_model(transformer(name), seed=0).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@torch.inference_mode()
def step(model: Model, batch: int = 1, *, on_device: bool = True) -> tuple[Tensor, Counter[str]]:
    """The logits of a step behind a prompt, and the ops of that step."""
    weight = model.embedder.token.weight
    tokens = torch.randint(VOCAB, (batch, 7), generator=torch.Generator().manual_seed(1)).to(weight.device)
    kind = KVCacheKind.BF16 if weight.dtype == torch.bfloat16 else KVCacheKind.FP32
    with lower(model, "cpu", "decode"):
        ctx = model.new_context(batch, 8, kind, static=True)
        with backend.without_kernels("small_batch_linear"):
            model(tokens[:, :-1], ctx)
        behind = DeviceContext(ctx) if on_device else ctx
        if isinstance(behind, DeviceContext):
            behind.advance()
        with Ops() as ops:
            logits = model(tokens[:, -1:], behind)
    return logits, ops.ran


@pytest.mark.parametrize("name", NAMES)
def test_a_step_gives_the_same_logits_in_fewer_ops(name: str, kernels: None) -> None:
    model = lively(name)
    for batch, on_device in ((1, True), (SMALL_BATCH_ROWS[torch.float32], True), (1, False)):
        logits, ran = step(model, batch, on_device=on_device)
        assert ran["small_batch_linear"] >= 4
        assert ran["rms_norm"] <= 1  # the last one, before the head
        assert not ran["linear"] + ran["mm"] + ran["addmm"]
        with backend.without_kernels("small_batch_linear"):
            want, by_layers = step(model, batch, on_device=on_device)
        assert by_layers["small_batch_linear"] == 0
        assert sum(by_layers.values()) > sum(ran.values()) or not on_device
        torch.testing.assert_close(logits, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_codes_of_8_bits_take_the_same_products(name: str, kernels: None) -> None:
    pytest.importorskip("torchao")
    model = lively(name)
    quantise_weights(model, WeightFormat.INT8, with_head=True)
    takes_row_products(model, least=5)


def takes_row_products(model: Model, *, least: int) -> None:
    """Hold a step of quantised weights to that of its layers one by one, which takes no product of few rows."""
    logits, ran = step(model)
    assert ran["small_batch_linear"] >= least
    assert ran["rms_norm"] <= 1
    assert not ran["linear"] + ran["mm"] + ran["addmm"]
    with backend.without_kernels("small_batch_linear"):
        want, by_layers = step(model)
    assert by_layers["small_batch_linear"] == 0
    torch.testing.assert_close(logits, want, rtol=2e-5, atol=2e-5)


GROUPED = {
    "gqa": {"mode": "gqa", "n_heads": 4, "n_kv_heads": 2},
    "latent": {
        **{"mode": "decoupled", "layout": "latent", "n_heads": 4, "n_kv_heads": 2},
        **{"head_dim": 16, "geo_dim": 8, "sem_dim": 32},
    },
    "a map that no group divides": {"mode": "bottleneck", "n_heads": 4, "attn_dim": 48},
}


def grouped(name: str) -> Model:
    """A model whose widths groups of codes divide: 64, 96 and 160."""
    norm = {"type": "RMSNormLayer", "d_model": 96}
    layers = [
        {"type": "AttentionLayer", "d_model": 96, **GROUPED[name]},
        {"type": "SwiGLULayer", "d_model": 96, "d_ff": 160},
    ]
    blocks = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in layers]
    spec = ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": VOCAB, "d_model": 96},
            "topology": {"type": "StackedTopology", "layers": [*blocks, norm]},
            "head": {"tied": True},
        }
    )
    return build_model(spec, seed=0).eval()


@pytest.mark.parametrize("name", GROUPED)
def test_codes_of_4_bits_take_the_same_products(name: str, kernels: None) -> None:
    pytest.importorskip("torchao")
    model = grouped(name)
    done = quantise_weights(model, WeightFormat.INT4, with_head=True)
    assert len(done.kept) == (name == "a map that no group divides")
    takes_row_products(model, least=4)


@pytest.mark.parametrize("name", GROUPED)
def test_a_generation_by_codes_of_4_bits_is_that_of_their_numbers(name: str) -> None:
    """On a CPU without kernels, where steps of plain layers take calls of their own."""
    pytest.importorskip("torchao")
    model, plain = grouped(name), grouped(name)
    done = quantise_weights(model, WeightFormat.INT4)
    with torch.no_grad():
        for layer in done.layers:
            coded = model.get_submodule(layer)
            assert isinstance(coded, QuantizedLinear)
            plain.get_submodule(layer).get_parameter("weight").copy_(
                dequantize_int4(coded.weight, coded.scale, torch.float32)
            )
    settings = {"max_new_tokens": 12, "temperature": 0.0}
    found, want = (Generator(one, **settings).generate([[1, 2, 3], [4]]) for one in (model, plain))
    assert [row.tokens for row in found] == [row.tokens for row in want]


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_layer_of_codes_is_its_product(dtype: torch.dtype, kernels: None) -> None:
    source = torch.Generator().manual_seed(0)
    codes = torch.randint(-127, 128, (24, 512), dtype=torch.int8, generator=source)
    codes[0] = 127  # the sums of such a row are beyond float16 before they are scaled
    scale, bias = torch.rand(24, generator=source) / 127, torch.randn(24, generator=source).to(dtype)
    layer = QuantizedLinear(codes, scale, bias)
    x = (torch.randn(3, 70, 512, generator=source) + 3).to(dtype)
    want = x.double() @ (codes.double() * scale.double()[:, None]).T + bias.double()
    bound = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-6}[dtype]
    for rows in (x, x[:1, :2]):
        found, exact = layer(rows), want[: len(rows), : rows.shape[1]]
        assert found.dtype == dtype
        assert float((found.double() - exact).norm() / exact.norm()) < bound


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_layer_of_codes_of_4_bits_is_its_product(dtype: torch.dtype, kernels: None) -> None:
    source = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(24, 96, generator=source), torch.randn(24, generator=source).to(dtype)
    layer = QuantizedLinear(*quantize_int4(weight, 32), bias)
    exact = dequantize_int4(layer.weight, layer.scale, torch.float64)
    assert 0.05 < float((exact - weight).norm() / weight.norm()) < 0.1
    x = torch.randn(3, 70, 96, generator=source).to(dtype)
    bound = {torch.float16: 2e-3, torch.bfloat16: 1e-2, torch.float32: 1e-6}[dtype]
    for rows in (x, x[:1, :2]):
        with Ops() as ops:
            found = layer(rows)
        assert ops.ran["small_batch_linear"] == (rows.shape[1] == 2)
        want = rows.double() @ exact.T + bias.double()
        with backend.without_kernels("small_batch_linear"):
            alone = layer(rows)
        for one in (found, alone):
            assert one.dtype == dtype
            assert float((one.double() - want).norm() / want.norm()) < bound
    with backend.without_kernels("small_batch_linear"):
        assert layer(x[:0]).shape == (0, 70, 24)
        assert layer(x[0, :3]).is_contiguous()
    layer.to(torch.bfloat16 if dtype == torch.float16 else torch.float16)
    assert (layer.weight.dtype, layer.scale.dtype) == (torch.int16, torch.bfloat16)


@torch.inference_mode()
def test_what_float16_holds_of_a_layer_of_codes_does_not_overflow() -> None:
    """4,096 weights of 0.01, for which sums of codes over 128 are four times what float16 holds."""
    codes, scale = torch.full((2, 4096), 127, dtype=torch.int8), torch.full((2,), 0.01 / 127)
    x = torch.full((1, 3, 4096), 64.0, dtype=torch.float16)
    found = QuantizedLinear(codes, scale, None)(x)
    torch.testing.assert_close(found.float(), torch.full((1, 3, 2), 64 * 40.96), rtol=1e-3, atol=0)


@torch.inference_mode()
def test_joined_codes_are_read_as_they_are_too(kernels: None) -> None:
    layers = [QuantizedLinear(torch.ones(n, 8, dtype=torch.int8), torch.rand(n), torch.rand(n)) for n in (3, 5)]
    weight, bias, scale = (
        torch.cat([layer.get_parameter(name) for layer in layers]) for name in ("weight", "bias", "scale")
    )
    x = torch.rand(1, 1, 8)
    with Ops() as ops:
        found = FusedLinear(weight, bias, [3, 5], scale)(x)
    assert (ops.ran["small_batch_linear"], ops.ran["_to_copy"]) == (1, 0)
    for part, layer in zip(found, layers, strict=True):
        torch.testing.assert_close(part, layer(x))


@torch.no_grad()
def test_joined_words_are_parts_of_one_product(kernels: None) -> None:
    def three(groups: tuple[int, int, int]) -> list[nn.Module]:
        source = torch.Generator().manual_seed(0)
        return [
            QuantizedLinear(
                *quantize_int4(torch.randn(n, 128, generator=source), group),
                torch.ones(n) if n == 5 else None,
            )
            for n, group in zip((3, 5, 2), groups, strict=True)
        ]

    x, layers = torch.rand(1, 1, 128), three((64, 64, 64))
    want = [layer(x) for layer in layers]
    for _ in range(2):
        fused = fuse(layers, is_compiled=False)
        assert fused is not None
        with Ops() as ops:
            found = fused(x)
        assert ops.ran["small_batch_linear"] == 1
        for part, alone in zip(found, want, strict=True):
            torch.testing.assert_close(part, alone)
    assert fuse(three((64, 32, 64)), is_compiled=False) is None, "their groups are of other sizes"


@torch.inference_mode()
def test_scales_keep_their_dtype(kernels: None) -> None:
    layer = QuantizedLinear(torch.ones(4, 8, dtype=torch.int8), torch.rand(4), torch.rand(4))
    exact = layer.scale.clone()
    layer.to(torch.bfloat16)
    assert (layer.weight.dtype, layer.scale.dtype) == (torch.int8, torch.float32)
    assert torch.equal(layer.scale, exact)
    assert layer(torch.rand(1, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_more_rows_gradients_and_autocast_take_the_layers(kernels: None) -> None:
    model = lively("gqa_scaled")
    assert step(model, SMALL_BATCH_ROWS[torch.float32] + 1)[1]["small_batch_linear"] == 0
    with torch.autocast("cpu", torch.bfloat16):
        assert step(model)[1]["small_batch_linear"] == 0
    tokens = torch.randint(VOCAB, (1, 2))
    with Ops() as ops:
        loss = model(tokens).sum()
    loss.backward()
    assert ops.ran["small_batch_linear"] == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@torch.inference_mode()
def test_numbers_of_16_bits_take_more_rows(dtype: torch.dtype, kernels: None) -> None:
    most = {torch.bfloat16: 64, torch.float32: 2}.get(dtype, 0)
    taken = [rows for rows in (1, 2, 3, 63, 64, 65) if is_small_batch(torch.zeros(rows, 1, 4, dtype=dtype))]
    assert taken == [rows for rows in (1, 2, 3, 63, 64) if rows <= most]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("batch", [1, 3, 8, 33, 64])
def test_steps_in_16_bits_on_a_gpu(batch: int) -> None:
    load("cuda")
    model = lively("gqa_scaled").bfloat16().cuda()
    logits, ran = step(model, batch)
    assert ran["small_batch_linear"] >= 4
    with backend.without_kernels("small_batch_linear"):
        want, _ = step(model, batch)
    assert float((logits.float() - want.float()).norm() / want.float().norm()) < 0.05


def hooked(mlp: SwiGLULayer) -> None:
    mlp.down.register_forward_hook(lambda *_: None)


def watched(mlp: SwiGLULayer) -> None:
    mlp.register_forward_pre_hook(lambda *_: None)


def replaced(mlp: SwiGLULayer) -> None:
    class Other(nn.Linear):
        """As an adapter or a quantised layer stands in for one."""

    mlp.up.__class__ = Other


def in_another_dtype(mlp: SwiGLULayer) -> None:
    mlp.gate.double()
    mlp.gate.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    mlp.gate.register_forward_hook(lambda *given: given[-1].float())


@pytest.mark.parametrize("change", [hooked, watched, replaced, in_another_dtype])
def test_a_changed_layer_runs_as_ever_and_the_others_do_not(
    change: Callable[[SwiGLULayer], None], kernels: None
) -> None:
    model = lively("gqa_scaled")
    want, plain = step(model)
    changed = copy.deepcopy(model)
    change(next(module for module in changed.modules() if isinstance(module, SwiGLULayer)))
    logits, ran = step(changed)
    assert 0 < ran["small_batch_linear"] < plain["small_batch_linear"]
    torch.testing.assert_close(logits, want, rtol=2e-5, atol=2e-5)


def test_generated_tokens_are_those_of_the_layers(kernels: None) -> None:
    model, prompt = lively("gqa_scaled"), [[3, 1, 4]]
    generator = Generator(model, None, compiled=False, max_new_tokens=6, temperature=0.0)
    (got,) = generator.generate(prompt)
    with backend.without_kernels("small_batch_linear"):
        (want,) = generator.generate(prompt)
    assert got.tokens == want.tokens
    torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(want.logprobs), rtol=1e-4, atol=1e-4)


def test_pass_replaces_every_block_and_restores_it(kernels: None) -> None:
    model = lively("gqa_scaled")
    names, blocks = list(model.state_dict()), [m for m in model.modules() if type(m) is ResidualTopology]
    with lower(model, "cpu", "decode") as lowered:
        readers = [m for m in model.modules() if isinstance(m, NormLinear)]
        assert lowered.replaced["norm_linear"] == len(blocks) + len(readers)
        assert len(blocks) >= 2
        assert all(isinstance(block, SmallBatchResidual) for block in blocks)
        assert list(model.state_dict()) == names
        with lower(model, "cpu", "decode") as inner:
            assert inner.replaced["norm_linear"] == 0
    assert all(type(block) is ResidualTopology and "fused_dtypes" not in vars(block) for block in blocks)


def test_pass_without_the_kernel_replaces_nothing() -> None:
    with lower(lively("gqa_scaled"), "cpu", "decode") as lowered:
        assert lowered.replaced["norm_linear"] == 0


def test_plain_model_with_the_kernel_runs_its_layers(kernels: None) -> None:
    """Only lowering fuses: the textbook forward has one path."""
    model, tokens = lively("gqa_scaled"), torch.tensor([[3]])
    with Ops() as ops, torch.inference_mode():
        model.topology(model.embedder(tokens), model.new_context(1, 2, KVCacheKind.FP32))
    assert ops.ran["small_batch_linear"] == 0
