"""The engine on a CUDA device: captured steps, and the CPU's text from the same seeds."""

from __future__ import annotations

import pytest
import torch

from caramba.infer import generate
from caramba.infer.engine import Engine
from caramba.layer.joined import joined_weights
from caramba.model import build_model
from tests.unit.infer.engine.test_engine import PROMPTS, SETTINGS, run, submit_all
from tests.unit.model.model_specs import transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["gqa_scaled", "decoupled_gate", "latent_gate", "latent_first"])
def test_captured_steps_give_the_text_of_the_cpu(name: str) -> None:
    model = build_model(transformer(name), seed=0)
    alone = [
        generate(model, [PROMPTS[index]], seeds=[7 + index], max_new_tokens=2 + index, **settings)[0].tokens
        for index, settings in enumerate(SETTINGS)
    ]
    model = model.cuda()
    found = {}
    for compiled in (False, "graph"):
        engine = Engine(
            model, n_slots=3, max_len=32, prefill_chunk=16, compiled=compiled, prefix_cache_bytes=1 << 20
        )
        for _ in range(2):  # the second time every graph is replayed
            tickets = submit_all(engine)
            run(engine)
            found[compiled] = [ticket.tokens for ticket in tickets]
            assert found[compiled] == alone
        stats = engine.stats()
        assert stats.failed == 0
        if name == "latent_first":
            assert (stats.decode, stats.not_compiled) == (
                "rows",
                "a layer keeps its first tokens at full precision",
            )
        else:
            assert stats.decode == ("graph" if compiled else "eager")
            assert stats.not_compiled is None


def test_captured_steps_pack_the_tails_of_a_quantised_cache() -> None:
    model = build_model(transformer("decoupled_gate"), seed=0).cuda()
    prompts = [[(3 * index + at) % 23 for at in range(n)] for index, n in enumerate((60, 126, 3))]
    engine = Engine(model, n_slots=3, max_len=144, prefill_chunk=48, cache_kind="mixed")
    tickets = [engine.submit(prompt, max_new_tokens=12, temperature=0.5) for prompt in prompts]
    run(engine)
    assert engine.stats().decode == "graph"
    for prompt, ticket in zip(prompts, tickets, strict=True):
        alone = generate(
            model, [prompt], prefill_chunk=48, max_new_tokens=12, temperature=0.5, cache_kind="mixed"
        )
        assert ticket.tokens == alone[0].tokens


def test_weights_that_move_between_steps_are_read_where_they_are() -> None:
    model = build_model(transformer("gqa_scaled"), seed=0).cuda()
    wanted = generate(model, [PROMPTS[1]], max_new_tokens=16, temperature=0)[0].tokens
    engine = Engine(model, n_slots=2, max_len=32, compiled="graph")
    ticket = engine.submit(PROMPTS[1], max_new_tokens=16, temperature=0)
    for _ in range(5):
        engine.step()
    before = [weight.data_ptr() for weight in model.parameters()]
    with joined_weights(model, is_compiled=True):
        assert [weight.data_ptr() for weight in model.parameters()] != before
    spoilt = [torch.full((2**at,), torch.nan, device="cuda") for at in range(4, 16)]
    run(engine)
    assert ticket.tokens == wanted
    assert len(spoilt) == 12
