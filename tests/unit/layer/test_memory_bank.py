"""Attention with memory slots: chunks, documents, rollback and cost, on real tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from caramba.cache import KVCacheKind, MemoryLayerKVCache
from caramba.config.estimate.model import model_cost
from caramba.config.layer import MemoryBankLayerConfig
from caramba.config.memory_bank import SPARE_TOKENS
from caramba.config.model import ModelSpec
from caramba.config.parallel_check import check_layers
from caramba.errors import ConfigError
from caramba.infer import Generator, SpeculativeGenerator
from caramba.infer.engine import Engine
from caramba.layer import MemoryBankLayer
from caramba.model import Model, build_model
from caramba.model.topology import checkpoint_topology

VOCAB, LENGTH = 61, 90
LAYER: dict[str, Any] = {
    "type": "MemoryBankLayer",
    "mode": "gqa",
    "d_model": 16,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 6,
    "local_window": 7,
    "memory_slots": 5,
}


def layer_config(**changes: Any) -> MemoryBankLayerConfig:
    return MemoryBankLayerConfig.model_validate(LAYER | changes)


def memory_spec(**changes: Any) -> ModelSpec:
    attention = {
        "type": "ResidualTopology",
        "layers": [{"type": "RMSNormLayer", "d_model": 16}, LAYER | changes],
    }
    return ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": VOCAB, "d_model": 16},
            "topology": {"type": "StackedTopology", "layers": [attention, attention]},
        }
    )


def memory_model(**changes: Any) -> Model:
    model = build_model(memory_spec(**changes), seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def tokens(n: int = LENGTH, rows: int = 2, seed: int = 0) -> Tensor:
    return torch.randint(VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


def in_chunks(model: Model, x: Tensor, sizes: list[int], **options: Any) -> Tensor:
    ctx = model.new_context(x.shape[0], x.shape[1], **options)
    with torch.no_grad():
        return torch.cat([model(part, ctx) for part in x.split(sizes, dim=1)], dim=1)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"memory_rope": True},
    {"qk_norm": True, "bias": True, "learned_temperature": True},
    {"rope_enabled": False, "mode": "standard", "n_kv_heads": None},
    {"q_chunk": 4},
    {"memory_bptt_chunks": 2},
    {"memory_first_tokens": 2, "memory_slot_bias": -0.5},
    {"memory_read": "gated"},
    {"memory_read": "gated", "memory_rope": True, "use_adaptive_compression": True, "memory_write_rate": 0.4},
]
VARIANTS[-1] |= {"memory_first_tokens": 1, "memory_slot_bias": 0.5}


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("sizes", [[1] * LENGTH, [3, 40, 1, 46], [LENGTH - 1, 1], [30, 30, 30]])
def test_memory_cache_in_chunks_equals_full_forward(sizes: list[int], changes: dict[str, Any]) -> None:
    model, x = memory_model(**changes), tokens()
    with torch.no_grad():
        full = model(x)
    torch.testing.assert_close(in_chunks(model, x, sizes), full, atol=1e-5, rtol=1e-5)


def test_memory_cache_in_half_precision_is_near_full_forward() -> None:
    model, x = memory_model().bfloat16(), tokens()
    with torch.no_grad():
        full = model(x).float()
    chunks = in_chunks(model, x, [5, 1, 84], kind=KVCacheKind.BF16).float()
    assert (chunks - full).norm() < 2e-2 * full.norm()


def test_truncated_backpropagation_changes_gradients_of_writes_alone() -> None:
    x = tokens()
    found: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
    for bptt in (1, 50):
        model = memory_model(memory_bptt_chunks=bptt, q_chunk=4)
        out = model(x)
        out.square().sum().backward()
        found[bptt] = (
            out.detach(),
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
        )
    model = memory_model(q_chunk=4)
    model(x).square().sum().backward()
    (one, short), (every, long) = found[1], found[50]
    assert torch.equal(one, every)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(long[name], parameter.grad)
    gates = [name for name in short if "slot_gate" in name]
    assert len(gates) == 4
    assert all(not torch.allclose(short[name], long[name]) for name in gates)


def test_slots_carry_what_left_the_window() -> None:
    model, x = memory_model(), tokens(rows=1)
    other = x.clone()
    other[0, 0] = (other[0, 0] + 1) % VOCAB
    reach = 2 * 7  # two layers of a window of 7
    with torch.no_grad():
        assert (model(x) - model(other))[0, 2 * reach :].abs().max() > 1e-4


@pytest.mark.parametrize("is_packed", [False, True])
def test_window_and_first_tokens_are_full_attention_where_no_token_lies_between(is_packed: bool) -> None:
    model = memory_model(memory_first_tokens=3, memory_slots=4, memory_rope=True)
    plain = memory_spec().model_dump(mode="json")
    for node in plain["topology"]["layers"]:
        node["layers"][1] = {key: LAYER[key] for key in LAYER if not key.startswith(("memory", "local", "type"))}
        node["layers"][1] |= {"type": "AttentionLayer"}
    full = build_model(ModelSpec.model_validate(plain)).eval()
    full.load_state_dict({name: x for name, x in model.state_dict().items() if "slot" not in name})
    x = tokens(20)
    documents = torch.arange(20).expand(2, -1) // 10 if is_packed else None
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, MemoryBankLayer):  # the slot of other tokens stays empty
                layer.slot_gate.zero_()
                layer.slot_gate_bias.fill_(200.0)
        theirs, ours = (one.logits(one.hidden(x, documents=documents)) for one in (full, model))
    seen = 20 if is_packed else 10  # a window of 7 and 3 first tokens
    torch.testing.assert_close(ours[:, :seen], theirs[:, :seen], atol=1e-5, rtol=1e-5)
    if not is_packed:
        assert (ours[:, seen:] - theirs[:, seen:]).abs().max() > 1e-4


@pytest.mark.parametrize("changes", [{}, VARIANTS[-1]])
def test_swapped_slots_give_each_row_the_memory_of_the_other(changes: dict[str, Any]) -> None:
    spec = memory_spec(**changes).model_dump(mode="json")
    spec["topology"]["layers"] = spec["topology"]["layers"][:1]  # a second layer's window holds what slots said
    model = build_model(ModelSpec.model_validate(spec), seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
        x, last = tokens(), 7 + SPARE_TOKENS
        x[1, -last:] = x[0, -last:]  # rows differ in the slots alone
        ctx, questions = model.new_context(2, LENGTH + 3), tokens(3, rows=1, seed=1).expand(2, -1)
        model(x, ctx)
        swapped = ctx.clone()
        for cache in swapped.caches:
            assert isinstance(cache, MemoryLayerKVCache)
            for state in cache.state:
                state.copy_(state.roll(1, 0))
        plain, other = model(questions, ctx), model(questions, swapped)
    assert (plain[0] - plain[1]).abs().max() > 1e-4
    torch.testing.assert_close(other, plain.roll(1, 0), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("changes", [{}, VARIANTS[-1]])
def test_documents_equal_forwards_of_their_own(changes: dict[str, Any]) -> None:
    model, x = memory_model(**changes), tokens(rows=1)
    ids = torch.tensor([[0] * 31 + [1] * 9 + [2] * 50])
    with torch.no_grad():
        packed = model(x, documents=ids)
        alone = torch.cat([model(part) for part in x.split([31, 9, 50], dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_rollback_continues_as_if_no_more_was_seen() -> None:
    model, x = memory_model(), tokens()
    with torch.no_grad():
        full = model(x)
        ctx = model.new_context(2, LENGTH)
        model(x[:, :50], ctx)
        model(tokens(SPARE_TOKENS, seed=9), ctx)
        ctx.truncate(50)
        torch.testing.assert_close(model(x[:, 50:], ctx), full[:, 50:], atol=1e-5, rtol=1e-5)


def test_failed_forward_leaves_the_context_unchanged() -> None:
    model, x = memory_model(), tokens()

    def fail(*_: Any) -> None:
        raise RuntimeError("second layer")

    with torch.no_grad():
        full = model(x)
        ctx = model.new_context(2, LENGTH)
        model(x[:, :30], ctx)
        layers = [module for module in model.modules() if isinstance(module, MemoryBankLayer)]
        hook = layers[1].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="second layer"):
            model(tokens(40, seed=9), ctx)
        hook.remove()
        torch.testing.assert_close(model(x[:, 30:], ctx), full[:, 30:], atol=1e-5, rtol=1e-5)


def test_rollback_beyond_the_spare_tokens_is_refused() -> None:
    model = memory_model()
    ctx = model.new_context(1, LENGTH)
    with torch.no_grad():
        for token in tokens(rows=1).split(1, dim=1):
            model(token, ctx)
    with pytest.raises(ConfigError, match="cannot roll 90 tokens back"):
        ctx.truncate(LENGTH - SPARE_TOKENS - 1)


@pytest.mark.parametrize("changes", [{}, VARIANTS[-1]])
def test_cache_bytes_do_not_grow_and_equal_infer(changes: dict[str, Any]) -> None:
    model = memory_model(**changes)
    cost = model_cost(model.spec)
    ctx = model.new_context(1, LENGTH)
    sizes = []
    with torch.no_grad():
        for part in tokens(rows=1).split(30, dim=1):
            model(part, ctx)
            sizes.append(ctx.nbytes())
    assert set(sizes) == {cost.first_bytes(KVCacheKind.FP32)}
    assert ctx.bytes_per_token == cost.kv_bytes_per_token(KVCacheKind.FP32) == 0
    assert sum(p.numel() for p in model.parameters()) == cost.params


def test_saved_state_continues_bit_equal_and_other_slots_are_refused() -> None:
    model, x = memory_model(), tokens()
    with torch.no_grad():
        ctx = model.new_context(2, LENGTH)
        model(x[:, :60], ctx)
        restored = model.new_context(2, LENGTH)
        restored.load_state_dict(ctx.state_dict())
        assert torch.equal(model(x[:, 60:], ctx), model(x[:, 60:], restored))
    with pytest.raises(ConfigError, match="the state has keys"):
        memory_model(memory_slots=6).new_context(2, LENGTH).load_state_dict(ctx.state_dict())


def test_speculative_decoding_gives_the_text_of_the_plain_generator() -> None:
    model, values = memory_model(), {"max_new_tokens": 60, "temperature": 0.0}
    prompts = [[1, 2, 3, 4] * 6]
    (plain,) = Generator(model, **values).generate(prompts)
    generator = SpeculativeGenerator(model, spec_k=16, spec_k_adaptive=False, **values)
    (row,) = generator.generate(prompts)
    assert row.tokens == plain.tokens
    assert generator.stats.drafted > 0


def test_engine_gives_each_request_what_it_gets_alone() -> None:
    model = memory_model()
    prompts = [[1, 2, 3] * 9, [4, 5] * 20, [7], [9, 8, 7, 6]]
    engine = Engine(model, n_slots=2, max_len=80, prefill_chunk=11)
    tickets = [engine.submit(prompt, max_new_tokens=20 + n, temperature=0.0) for n, prompt in enumerate(prompts)]
    while engine.step():
        pass
    for n, (ticket, prompt) in enumerate(zip(tickets, prompts, strict=True)):
        (alone,) = Generator(model, max_new_tokens=20 + n, temperature=0.0).generate([prompt])
        assert ticket.tokens == alone.tokens
    engine.close()
    with pytest.raises(ConfigError, match="memory slots have no state of a prefix"):
        Engine(model, n_slots=2, max_len=80, prefix_cache_bytes=1000)


def test_checkpointing_gives_the_same_gradients() -> None:
    gradients = []
    for level in ("none", "full", "selective"):
        model = memory_model().train()
        checkpoint_topology(model.topology, level, "layer")
        model(tokens()).logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for one, *others in zip(*gradients, strict=True):
        for other in others:
            assert torch.equal(one, other)


def test_bf16_autocast_trains() -> None:
    model = memory_model().train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens()).float().logsumexp(-1).sum()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.compile
def test_compiled_training_step_equals_eager() -> None:
    model, x = memory_model().train(), tokens(40)
    expected = torch.autograd.grad(model(x).logsumexp(-1).sum(), list(model.parameters()))
    compiled = torch.compile(model.topology, backend="aot_eager", fullgraph=True)
    hidden = compiled(model.embedder(x))
    found = torch.autograd.grad(model.logits(hidden).logsumexp(-1).sum(), list(model.parameters()))
    for one, two in zip(expected, found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_training_gradients_reach_the_gates() -> None:
    model, x = memory_model().train(), tokens()
    model(x).logsumexp(-1).sum().backward()
    for module in model.modules():
        if isinstance(module, MemoryBankLayer):
            for parameter in module.parameters():
                assert parameter.grad is not None
                assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_window": None}, "needs local_window"),
        ({"memory_slots": 0}, "greater than 0"),
        ({"memory_slots": None}, "needs memory_slots"),
        ({"memory_compression_ratio": 2}, "needs max_sequence_length"),
        ({"memory_compression_ratio": 2, "max_sequence_length": 100}, "contradicts"),
        ({"memory_compression_ratio": 20, "max_sequence_length": 100, "memory_slots": None}, "takes them"),
        ({"cache_format": "q4_0"}, "cache_format=q4_0 is not built"),
        ({"mode": "decoupled", "sem_dim": 8, "geo_dim": 8}, "mode=decoupled is not built"),
        ({"attention_block_size": 4, "q_chunk": 8}, "name the same key"),
        ({"memory_first_tokens": 5}, "takes all of 5 slots; use at most 4"),
    ],
)
def test_wrong_keys_are_refused_with_a_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        layer_config(**changes)


def test_slots_follow_from_the_ratio() -> None:
    config = layer_config(memory_slots=None, memory_compression_ratio=4, max_sequence_length=64)
    assert config.slots == 9
    assert layer_config(attention_block_size=4).q_chunk == 4


def test_quantised_cache_and_tensor_parallel_are_refused() -> None:
    with pytest.raises(ConfigError, match="memory slots are not quantised"):
        memory_model().new_context(1, 32, KVCacheKind.Q8_0)
    with pytest.raises(ConfigError, match="no plan for a MemoryBankLayer"):
        check_layers(memory_spec(), 2, split_sequence=False)


def test_new_context_gives_memory_caches() -> None:
    ctx = memory_model().new_context(1, 32)
    assert [type(cache) for cache in ctx.caches] == [MemoryLayerKVCache] * 2
