"""The engine on a CUDA device: captured steps, and the CPU's text from the same seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from caramba.infer import generate
from caramba.infer.engine import Engine, batch
from caramba.lower.lowering import lower
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
        engine = Engine(model, n_slots=3, max_len=32, prefill_chunk=16, compiled=compiled, prefix_cache_bytes=1 << 20)
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
        options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.5, "cache_kind": "mixed"}
        alone = generate(model, [prompt], prefill_chunk=48, compiled=False, **options)
        assert ticket.tokens == alone[0].tokens


def test_weights_that_move_between_steps_are_read_where_they_are() -> None:
    # Two models: where kernels are loaded a generation lays weights side by side, and there they stay.
    other, model = (build_model(transformer("gqa_scaled"), seed=0).cuda() for _ in range(2))
    wanted = generate(other, [PROMPTS[1]], compiled=False, max_new_tokens=16, temperature=0)[0].tokens
    engine = Engine(model, n_slots=2, max_len=32, compiled="graph")
    ticket = engine.submit(PROMPTS[1], max_new_tokens=16, temperature=0)
    for _ in range(5):
        engine.step()
    before = [weight.data_ptr() for weight in model.parameters()]
    with lower(model, "cuda", "decode", is_compiled=True):
        assert [weight.data_ptr() for weight in model.parameters()] != before
    spoilt = [torch.full((2**at,), torch.nan, device="cuda") for at in range(4, 16)]
    run(engine)
    assert ticket.tokens == wanted
    assert len(spoilt) == 12


class Waits(TorchDispatchMode):
    """Notes copies between host and device that wait for what the stream has been given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.n_uploads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_cuda:
            for given in args:
                if isinstance(given, Tensor) and given.is_cpu and given.dim():
                    self.n_uploads += 1
                    if not given.is_pinned():
                        self.found.append(f"{func}: {tuple(given.shape)}")
        return out


@pytest.mark.parametrize("beside", [1, batch.MAX_OVERLAP_STEPS])
def test_nothing_but_the_read_of_tokens_waits_for_the_device(beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MAX_OVERLAP_STEPS", beside)
    model = build_model(transformer("gqa_scaled"), seed=0)
    alone = [
        generate(model, [PROMPTS[index]], seeds=[7 + index], max_new_tokens=2 + index, **settings)[0].tokens
        for index, settings in enumerate(SETTINGS)
    ]
    engine = Engine(model.cuda(), n_slots=3, max_len=32, prefill_chunk=16, compiled="graph")
    for _ in range(2):  # what is captured or allocated once
        submit_all(engine)
        run(engine)
    tickets = submit_all(engine)
    waits = Waits()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with waits:
            run(engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert waits.found == []
    assert waits.n_uploads >= 2 * len(PROMPTS), "prompts, settings and lengths come from the host"
    assert [ticket.tokens for ticket in tickets] == alone
    assert engine.stats().failed == 0
