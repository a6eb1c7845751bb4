"""Generation on a CUDA device: the CPU's text from the same seeds, and a draw that a graph can hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from caramba import kernels
from caramba.config.generate import GenerateConfig
from caramba.infer import Generator, SpeculativeGenerator
from caramba.infer.row import GenerationRow
from caramba.infer.step import StepState
from caramba.model import build_model
from caramba.ops.backend import without_kernels
from tests.unit.model.model_specs import VOCAB, biased, transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [3]]
EAGER: dict[str, Any] = {"compiled": False}
VALUES: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 0.9,
    "top_k": 12,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
}


@pytest.mark.parametrize("name", ["gqa_scaled", "decoupled_gate", "latent_gate"])
def test_the_same_seeds_give_the_text_of_the_cpu(name: str) -> None:
    model = build_model(transformer(name), seed=0)
    there = Generator(model, **VALUES).generate(PROMPTS)
    model = model.cuda()
    here = Generator(model, **VALUES, **EAGER).generate(PROMPTS)
    assert [row.tokens for row in here] == [row.tokens for row in there]
    plain: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.9, **EAGER}  # a draw of which is one op
    there_plain = Generator(copy.deepcopy(model).cpu(), **plain).generate(PROMPTS)
    here_plain = Generator(model, **plain).generate(PROMPTS)
    assert [row.tokens for row in here_plain] == [row.tokens for row in there_plain]
    lookup = SpeculativeGenerator(model, **VALUES, **EAGER).generate(PROMPTS[1:2], seeds=[1338])
    assert lookup[0].tokens == there[1].tokens
    draft = SpeculativeGenerator(model, draft=model, spec_method="draft", **VALUES, **EAGER)
    draft.generate(PROMPTS[1:2])
    assert draft.acceptance_rate > 0.9
    together = SpeculativeGenerator(model, **VALUES, **EAGER)
    assert [row.tokens for row in together.generate(PROMPTS)] == [row.tokens for row in there]
    assert together.stats.not_batched is None
    values: dict[str, Any] = {**VALUES, **EAGER, "temperature": 0.0}
    early = SpeculativeGenerator(model, spec_method="early_exit", **values)
    greedy = Generator(model, **values).generate(PROMPTS)
    assert [row.tokens for row in early.generate(PROMPTS)] == [row.tokens for row in greedy]


@pytest.mark.parametrize("name", ["gqa_scaled", "latent_gate"])
def test_steps_are_captured_unless_something_else_is_asked(name: str) -> None:
    model = build_model(transformer(name), seed=0).cuda()
    values: dict[str, Any] = {**VALUES, "max_new_tokens": 24}
    wanted = Generator(model, **values, **EAGER).generate(PROMPTS)
    generator = Generator(model, **values)
    for captures in (1, 0):
        assert [row.tokens for row in generator.generate(PROMPTS)] == [row.tokens for row in wanted]
        stats = generator.stats
        assert (stats.decode, stats.not_compiled, stats.captures) == ("graph", None, captures)
    lookup = SpeculativeGenerator(model, **values)
    assert [row.tokens for row in lookup.generate(PROMPTS)] == [row.tokens for row in wanted]
    assert (lookup.stats.decode, lookup.stats.not_compiled) == ("graph", None)
    assert lookup.speed_up() is not None
    values["max_new_tokens"] = 4
    wanted, short = Generator(model, **values, **EAGER).generate(PROMPTS[:1]), Generator(model, **values)
    for ran in ("eager", "graph"):
        assert short.generate(PROMPTS[:1])[0].tokens == wanted[0].tokens
        assert (short.stats.decode, short.stats.not_compiled is None) == (ran, ran == "graph")


@torch.inference_mode()
def test_a_captured_draw_is_the_eager_one() -> None:
    config = GenerateConfig(**VALUES, min_p=0.01)
    rows = GenerationRow.of([list(prompt) for prompt in PROMPTS], config, (), None, None)
    device = torch.device("cuda")
    logits = torch.randn(20, 3, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    eager, captured = (StepState.of(rows, config, VOCAB, device) for _ in range(2))
    expected = [eager.choose(one, config) for one in logits]
    warm = StepState.of(rows, config, VOCAB, device)
    static = logits[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            warm.choose(static, config)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fed = captured.choose(static, config)
    found = []
    for one in logits:
        static.copy_(one)
        graph.replay()
        found.append(fed.clone())
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert torch.equal(captured.tokens, eager.tokens)
    assert torch.equal(captured.logprobs, eager.logprobs)


@pytest.mark.parametrize("compiled", ["graph", True])
@pytest.mark.parametrize("name", ["gqa_scaled", "latent_gate"])
def test_graphs_of_a_bucket_are_captured_once(name: str, compiled: Any) -> None:
    model = build_model(transformer(name), seed=0).cuda()
    options = {**VALUES, "read_every": 4}
    eager, stepped = Generator(model, **options, **EAGER), Generator(model, compiled=compiled, **options)
    for index, prompts in enumerate((PROMPTS, PROMPTS[::-1], [[7, 7], [1] * 9, [2] * 5])):
        wanted = eager.generate(prompts)
        found = stepped.generate(prompts)
        assert [row.tokens for row in found] == [row.tokens for row in wanted]
        assert stepped.stats.decode == ("graph" if compiled == "graph" else "compiled graph")
        assert stepped.stats.captures == (0 if index else 1)
        assert stepped.stats.compilations == (1 if compiled is True and not index else 0)
    stepped.generate([[1] * 600, [2] * 600, [3] * 600])  # another bucket: captured, not compiled again
    assert (stepped.stats.captures, stepped.stats.compilations) == (1, 0)


@pytest.mark.parametrize(
    ("name", "kind"), [("latent", "mixed"), ("latent", "q8_0"), ("gqa_scaled", "q8_0"), ("window", "nf4")]
)
def test_graphs_of_a_quantised_cache_are_captured_once(name: str, kind: str) -> None:
    model = build_model(transformer(name), seed=0).cuda()
    options: dict[str, Any] = {"max_new_tokens": 70, "temperature": 0.0, "cache_kind": kind}
    eager, stepped = Generator(model, **options, **EAGER), Generator(model, compiled="graph", **options)
    for index, prompts in enumerate(([[1, 2, 3] * 50], [[5, 4] * 40], [[7] * 129])):
        wanted, found = eager.generate(prompts), stepped.generate(prompts)
        assert [row.tokens for row in found] == [row.tokens for row in wanted]
        assert stepped.stats.decode == "graph"
        assert stepped.stats.captures == (0 if index else 1)


def test_memory_stays_flat_from_call_to_call() -> None:
    model = build_model(transformer("latent_gate"), seed=0).cuda()
    generator = Generator(model, compiled="graph", max_new_tokens=64, temperature=0.0)
    used = []
    for _ in range(4):
        generator.generate([[1, 2, 3]])
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_allocated())
    assert len(set(used[1:])) == 1


@pytest.mark.parametrize("method", ["lookup", "early_exit"])
@pytest.mark.parametrize("name", ["gqa_scaled", "latent_gate"])
def test_verifying_forwards_are_captured_by_width_once(name: str, method: str) -> None:
    model = build_model(transformer(name), seed=0).cuda()
    values: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "spec_k": 7}
    eager = SpeculativeGenerator(model, spec_method=method, **values, **EAGER)
    stepped = SpeculativeGenerator(model, spec_method=method, compiled="graph", **values)
    captures = []
    for prompts in (PROMPTS, [[1, 2, 3, 4] * 3, [5], [6, 7] * 4], PROMPTS):
        wanted = eager.generate(prompts)
        assert [row.tokens for row in stepped.generate(prompts)] == [row.tokens for row in wanted]
        assert (stepped.stats.decode, stepped.stats.not_compiled) == ("graph", None)
        captures.append(stepped.stats.captures)
    assert 0 < captures[0] <= sum(captures) <= 4
    assert captures[2] == 0


@pytest.mark.parametrize(
    "values",
    [{"temperature": 0.0}, {"temperature": 0.9}, {"temperature": 0.0, "repetition_penalty": 1.2}, VALUES],
)
@pytest.mark.parametrize("adaptive", [True, False])
def test_captured_rounds_of_lookup_write_the_text_of_plain_decode(values: dict[str, Any], adaptive: bool) -> None:
    model = build_model(transformer("gqa_scaled"), seed=0).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6)  # likeliest by more than rounding, and repeating itself
    values = {**values, "max_new_tokens": 40}
    plain = Generator(model, **values, **EAGER)
    rounds = SpeculativeGenerator(model, compiled="graph", spec_k=7, spec_k_adaptive=adaptive, **values)
    for prompts in (PROMPTS[1:2], PROMPTS, [[1, 2, 3, 4] * 3, [5], [6, 7] * 4], PROMPTS):
        wanted = plain.generate(prompts)
        found = rounds.generate(prompts)
        assert [row.tokens for row in found] == [row.tokens for row in wanted]
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-2)
        assert (rounds.stats.decode, rounds.stats.not_compiled) == ("graph", None)
    assert rounds.stats.captures == 0
    assert rounds.acceptance_rate > 0 or values != {"temperature": 0.0, "max_new_tokens": 40}


@pytest.mark.parametrize("compiled", ["graph", True])
@pytest.mark.parametrize("speculates", [False, True])
def test_graphs_of_joined_layers_with_biases_serve_later_calls(speculates: bool, compiled: Any) -> None:
    model = build_model(biased(), seed=0).cuda()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    values: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0}
    wanted = [row.tokens for row in Generator(model, **values, **EAGER).generate(PROMPTS)]
    stepped = (
        SpeculativeGenerator(model, compiled=compiled, spec_k=3, spec_k_adaptive=False, **values)
        if speculates
        else Generator(model, compiled=compiled, **values)
    )
    for index in range(3):
        assert [row.tokens for row in stepped.generate(PROMPTS)] == wanted
        assert stepped.stats.decode == ("compiled graph" if compiled is True else "graph")
        assert (stepped.stats.captures > 0) == (index == 0)
        assert (stepped.stats.compilations > 0) == (index == 0 and compiled is True)
        # What a call left free is written over.
        spoilt = [torch.full((2**at,), torch.nan, device="cuda") for at in range(4, 16)]
        del spoilt


def test_one_row_is_drawn_by_a_graph_as_by_the_host() -> None:
    model = build_model(transformer("gqa_scaled"), seed=0).cuda()
    for values in (VALUES, {"max_new_tokens": 2, "temperature": 0.0}):
        wanted = Generator(model, **values, **EAGER).generate(PROMPTS[:1])
        for compiled in ("graph", True):
            found = Generator(model, compiled=compiled, **values).generate(PROMPTS[:1])
            assert [row.tokens for row in found] == [row.tokens for row in wanted]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("gqa_scaled", "graph"),
        ("decoupled", "graph"),
        ("latent", "graph"),
        ("latent", False),
        ("gqa_scaled", True),
    ],
)
def test_products_of_few_rows_give_the_text_of_the_library(name: str, form: bool | str) -> None:
    kernels.load("cuda")
    torch._dynamo.reset()
    model = build_model(transformer(name), seed=0).cuda()
    values: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "compiled": form}
    for prompts in (PROMPTS[:1], PROMPTS):
        here = Generator(model, **values).generate(prompts)
        with without_kernels("small_batch_linear", "argmax_logprob"):
            there = Generator(copy.deepcopy(model), **values).generate(prompts)
        assert [row.tokens for row in here] == [row.tokens for row in there]
        for one, other in zip(here, there, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rounds_of_lookup_run_on_a_device_that_is_not_the_current_one() -> None:
    model = build_model(transformer("gqa_scaled"), seed=0).to("cuda:1")
    values: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0.0}
    prompts = [[1, 2, 3, 4] * 3, [5], [6, 7] * 4]
    wanted = Generator(model, **values, **EAGER).generate(prompts)
    rounds = SpeculativeGenerator(model, compiled="graph", spec_k=7, **values)
    for _ in range(3):
        assert [row.tokens for row in rounds.generate(prompts)] == [row.tokens for row in wanted]
    assert (rounds.stats.decode, torch.cuda.current_device()) == ("graph", 0)
