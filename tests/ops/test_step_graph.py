"""A decode step as one graph: compiled without a break and without a copy of the cache; captured and replayed on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from caramba.cache import Context, DeviceContext, KVCacheKind
from caramba.infer import Generator
from caramba.infer.device_steps import capture_graph, next_logits, replay_graph
from caramba.model import Model, build_model
from tests.unit.model.model_specs import ATTENTION, VOCAB, transformer

PROMPT, N_STEPS = 5, 20
CAPACITY = PROMPT + N_STEPS
TAIL = 4  # of a quantised cache: blocks are made every few steps
NAMES = ["gqa_scaled", "decoupled", "latent"]


def lively(name: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Model:
    model = build_model(transformer(name), seed=0).eval()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.to(device, dtype)


def tokens_of(device: str = "cpu") -> Tensor:
    return torch.randint(VOCAB, (2, CAPACITY), generator=torch.Generator().manual_seed(1)).to(device)


def prefilled(model: Model, kind: KVCacheKind, device: str = "cpu") -> Context:
    ctx = model.new_context(2, CAPACITY, kind, static=True, tail_tokens=TAIL)
    model(tokens_of(device)[:, :PROMPT], ctx)
    return ctx


@pytest.fixture(autouse=True)
def no_compiled_code_is_left() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, KVCacheKind.BF16) for name in NAMES),
        ("latent", KVCacheKind.MIXED),
        ("gqa_scaled", KVCacheKind.Q8_0),
    ],
)
@torch.no_grad()
def test_the_compiled_step_is_one_graph_for_all_positions(name: str, kind: KVCacheKind) -> None:
    graphs: list[Any] = []

    def kept(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = lively(name)
    backend = aot_autograd(fw_compiler=kept, inference_compiler=kept, keep_inference_input_mutations=True)
    compiled = torch.compile(next_logits, backend=backend, fullgraph=True)
    eager, step = (DeviceContext(prefilled(model, kind)) for _ in range(2))
    for t in range(PROMPT, CAPACITY):
        for one in (eager, step):
            one.advance()
        wanted = next_logits(model, tokens_of()[:, t], eager)
        torch.testing.assert_close(compiled(model, tokens_of()[:, t], step), wanted)
    assert len(graphs) == 1
    assert step.device_lengths.tolist() == [CAPACITY] * 2


class _SeenError(Exception):
    """Ends a compilation once its graph is known: no code is made."""


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_compiler_writes_into_the_cache_without_a_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import post_grad  # takes two seconds, in every process that collects

    graphs: list[Any] = []
    decompose = post_grad.decompose_auto_functionalized

    def seen(graph: Any) -> None:
        decompose(graph)
        graphs.append(graph)
        raise _SeenError

    monkeypatch.setattr(post_grad, "decompose_auto_functionalized", seen)
    model = lively(name)
    ctx = prefilled(model, KVCacheKind.BF16)
    smallest = min(values.numel() for cache in ctx.caches for values in cache.allocations)
    with pytest.raises(Exception, match="_SeenError"):
        torch.compile(next_logits, fullgraph=True)(model, tokens_of()[:, PROMPT], DeviceContext(ctx))
    nodes = list(graphs[0].nodes)
    appends = [node for node in nodes if node.target is torch.ops.caramba.dba_append.default]
    assert len(appends) == len(ctx.caches)
    # What is written are the caches themselves, as the graph is given them.
    assert all(buffer.op == "placeholder" for node in appends for buffer in node.args[1])
    for node in nodes:
        if node.target is torch.ops.aten.clone.default:
            assert node.meta["val"].numel() < smallest, node.format_node()
        if node.target is torch.ops.aten.copy_.default and node.args[0].meta["val"].numel() >= smallest:
            assert node.args[0] is node.args[1], node.format_node()


@pytest.mark.slow
def test_a_compiled_generation_draws_the_same_tokens() -> None:
    model = lively("latent").double()
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.9, "top_k": 12}
    wanted = Generator(model, **options).generate(prompts)
    compiled = Generator(model, compiled=True, **options)
    for _ in range(2):  # the second generation makes new buffers and compiles nothing
        assert [row.tokens for row in compiled.generate(prompts)] == [row.tokens for row in wanted]
    assert compiled.stats.decode.startswith("compiled")


CAPTURED = [
    (name, kind)
    for name, options in ATTENTION.items()
    for kind in (KVCacheKind.FP32, KVCacheKind.FP16, KVCacheKind.BF16)
    if "exact_first_tokens" not in options
]
PACKED = [
    ("decoupled", KVCacheKind.MIXED),
    ("latent", KVCacheKind.MIXED),
    ("latent", KVCacheKind.NF4),
    ("gqa_scaled", KVCacheKind.Q8_0),
    ("bottleneck", KVCacheKind.NF4),
    ("window", KVCacheKind.MIXED),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "kind"), CAPTURED + PACKED)
@torch.no_grad()
def test_a_captured_step_replays_as_eager_and_takes_no_memory(name: str, kind: KVCacheKind) -> None:
    from caramba import kernels

    kernels.load("cuda")
    model = lively(name, "cuda")
    wanted, ctx = (prefilled(model, kind, "cuda") for _ in range(2))
    step = DeviceContext(ctx)
    tokens = tokens_of("cuda")

    def run(token: Tensor) -> Tensor:
        return next_logits(model, token, step)

    graph = capture_graph(tokens[:, PROMPT], run, run)
    step.truncate(PROMPT)
    found = torch.empty(N_STEPS, 2, VOCAB, device="cuda")
    taken = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    for t in range(PROMPT, CAPACITY):
        step.advance()
        found[t - PROMPT].copy_(replay_graph(graph, tokens[:, t]))
    if (name, kind) not in PACKED:  # to make blocks between the steps takes some
        assert (torch.cuda.memory_reserved(), torch.cuda.memory_allocated()) == taken
    expected = [model(tokens[:, t : t + 1], wanted)[:, 0] for t in range(PROMPT, CAPACITY)]
    # Both attend to the same blocks; what a step rounds differently may round to another code now and then.
    bound = {KVCacheKind.FP32: 1e-4, KVCacheKind.FP16: 5e-3, KVCacheKind.BF16: 4e-2}.get(kind, 1e-1)
    torch.testing.assert_close(found, torch.stack(expected), rtol=bound, atol=bound)
    assert ctx.position == CAPACITY
    assert step.device_lengths.tolist() == [CAPACITY] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", ["graph", True])
@pytest.mark.parametrize("name", NAMES)
def test_a_captured_generation_draws_the_same_tokens(name: str, compiled: bool | str) -> None:
    model = lively(name, "cuda")
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [3]]
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "temperature": 0.9,
        "top_k": 12,
        "repetition_penalty": 1.2,
    }
    wanted = Generator(model, compiled=False, **options).generate(prompts)
    captured_one = Generator(model, compiled=compiled, **options)
    for _ in range(2):
        assert [row.tokens for row in captured_one.generate(prompts)] == [row.tokens for row in wanted]
    assert captured_one.stats.decode == ("graph" if compiled == "graph" else "compiled graph")
    assert captured_one.stats.not_compiled is None
