"""Statistics of memory slots, and resizing them on weights and optimiser state."""

from __future__ import annotations

import pytest
import torch
from tests.unit.layer.test_memory_bank import memory_model, tokens
from tests.unit.model.model_specs import transformer

from caramba.errors import ConfigError
from caramba.layer import MemoryBankLayer
from caramba.model import Model, build_model


def layers_of(model: Model) -> list[MemoryBankLayer]:
    return [layer for layer in model.modules() if isinstance(layer, MemoryBankLayer)]


def test_statistics_count_what_queries_read() -> None:
    model = memory_model()
    stats = model.get_memory_stats(tokens())
    assert 0 < stats["utilization"] <= 1
    assert 0 < stats["memory_mass"] < 1
    assert 0 < stats["write_rate"] < 1
    assert model.get_memory_stats() is stats
    for use in stats["layers"].values():
        assert use["read_mass"].shape == (2, 5)
        assert use["read_mass"].sum(-1).mean().item() == pytest.approx(use["memory_mass"])
    assert all(layer.use is None for layer in layers_of(model))


def test_read_mass_of_a_window_0_is_all_of_it_after_the_first_write() -> None:
    from tests.unit.ops.test_memory_bank import B, H, T, arguments

    from caramba.ops.memory_bank import slot_reads

    reads = slot_reads(*(x.detach() for x in arguments()), window=0, chunk=4)
    assert reads.sum().item() == pytest.approx(B * H * T)
    assert reads.shape[0] == H


def test_statistics_of_text_within_the_window_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing leaves a window of 7"):
        memory_model().get_memory_stats(tokens(7))
    with pytest.raises(ConfigError, match="no tokens were measured"):
        memory_model().get_memory_stats()
    with pytest.raises(ConfigError, match="no MemoryBankLayer"):
        build_model(transformer("standard")).get_memory_stats(tokens())


def test_collapse_is_warned_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    model = memory_model()
    model.resize_memory(20)  # the 15 new slots are closed, hence never read
    for _ in range(2):
        assert model.get_memory_stats(tokens())["dead_share"] == pytest.approx(0.75)
    assert capsys.readouterr().err.count("75% are dead") == 1


def test_more_slots_leave_logits_as_they_are() -> None:
    model, x = memory_model(memory_slots=64), tokens()
    with torch.no_grad():
        before = model(x)
        model.resize_memory(128)
        assert (model(x) - before).abs().max() <= 1e-6
        ctx = model.new_context(2, x.shape[1])
        assert (torch.cat([model(part, ctx) for part in x.split(9, 1)], 1) - before).abs().max() <= 1e-5
    assert [layer.config.slots for layer in layers_of(model)] == [128, 128]
    again = build_model(model.spec)
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(again(x), model(x))


def test_open_slots_are_written_and_trained() -> None:
    model = memory_model().train()
    model.resize_memory(8, is_open=True)
    model(tokens()).logsumexp(-1).sum().backward()
    for layer in layers_of(model):
        assert layer.slot_gate.grad is not None
        assert (layer.slot_gate.grad.abs().sum((0, 2)) > 0).all()


def test_fewer_slots_keep_those_read_most_in_weights_and_optimizer() -> None:
    model, x = memory_model().train(), tokens()
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).logsumexp(-1).sum().backward()
    optimizer.step()
    layer = layers_of(model)[0]
    gates, first = layer.slot_gate, layer.slot_gate.detach().clone()
    bias = layer.slot_gate_bias.detach().clone().view(2, 5)
    moment = optimizer.state[gates]["exp_avg"].clone()
    bias_moment = optimizer.state[layer.slot_gate_bias]["exp_avg"].clone().view(2, 5)
    reads = next(iter(model.get_memory_stats(x)["layers"].values()))["read_mass"]
    model.reduce_memory_slots(3, optimizer=optimizer)
    assert layer.slot_gate is gates
    for head in range(2):
        kept = sorted(reads[head].argsort(descending=True)[:3].tolist())
        assert torch.equal(gates[head], first[head, kept])
        assert torch.equal(layer.slot_gate_bias.view(2, 3)[head], bias[head, kept])
        assert torch.equal(optimizer.state[gates]["exp_avg"][head], moment[head, kept])
        found = optimizer.state[layer.slot_gate_bias]["exp_avg"].view(2, 3)[head]
        assert torch.equal(found, bias_moment[head, kept])
    model(x).logsumexp(-1).sum().backward()
    optimizer.step()


def test_resize_without_statistics_or_slots_is_refused() -> None:
    model = memory_model()
    with pytest.raises(ConfigError, match="call get_memory_stats"):
        model.resize_memory(3)
    with pytest.raises(ConfigError, match="at least 1"):
        model.resize_memory(0)
    assert layers_of(model)[0].config.slots == 5


def test_slots_of_first_tokens_stay() -> None:
    model, x = memory_model(memory_first_tokens=2), tokens()
    reads = next(iter(model.get_memory_stats(x)["layers"].values()))["read_mass"]
    reads[:, :2] = 0
    layer = layers_of(model)[0]
    first = layer.slot_gate.detach().clone()
    model.resize_memory(3)
    assert torch.equal(layer.slot_gate[:, :2], first[:, :2])
    with pytest.raises(ConfigError, match=r"got 2 slots, and .* holds the first 2 tokens in as many; use at least 3"):
        model.resize_memory(2)
