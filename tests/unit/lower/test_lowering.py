"""What lowering promises: the same model afterwards, the same names during, nothing under `kernels: reference`."""

from __future__ import annotations

import pytest
import torch
from tests.unit.lower.test_cpu_decode import lively, logits
from torch import nn

from caramba import kernels
from caramba.errors import ConfigError
from caramba.lower.cpu_decode import CpuDecode
from caramba.lower.lowering import PASSES, lower
from caramba.model import Model


def shape_of(model: Model) -> dict[str, type[nn.Module]]:
    return {name: type(module) for name, module in model.named_modules()}


def test_names_and_values_stay_and_restore_gives_the_plain_model_back() -> None:
    model = lively("gqa_scaled")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = shape_of(model)
    lowered = lower(model, "cpu", "decode")
    assert lowered.replaced["cpu_decode"] == 1
    assert lowered.replaced["fuse_linears"] >= 2
    assert isinstance(model.topology, CpuDecode)
    for _ in range(2):
        found = model.state_dict()
        assert list(found) == list(before)
        for name, tensor in found.items():
            assert torch.equal(tensor, before[name]), name
        lowered.restore()
    assert shape_of(model) == kinds
    assert "step" not in model.topology.__dict__
    assert not any("fused_linear" in module.__dict__ for module in model.modules())


def test_an_inner_lowering_leaves_the_outer_one_in_place() -> None:
    model = lively("gqa_scaled")
    with lower(model, "cpu", "decode"):
        with lower(model, "cpu", "decode") as inner:
            assert not any(inner.replaced.values())
        assert isinstance(model.topology, CpuDecode)
    assert not isinstance(model.topology, CpuDecode)


def test_a_hook_between_two_lowerings_counts() -> None:
    model = lively("gqa_scaled")
    wanted, _ = logits(model)
    seen: list[nn.Module] = []
    layer = model.attention_layers()[0][1]
    handle = layer.register_forward_hook(lambda module, *_: seen.append(module))
    torch.testing.assert_close(logits(model)[0], wanted, rtol=1e-6, atol=1e-6)
    assert len(seen) == 4
    with lower(model, "cpu", "decode"):
        assert not isinstance(model.topology, CpuDecode)
    handle.remove()
    with lower(model, "cpu", "decode"):
        assert isinstance(model.topology, CpuDecode)


@pytest.mark.parametrize("name", ["prefill", "train"])
def test_modes_take_their_passes(name: str) -> None:
    model = lively("gqa_scaled")
    with lower(model, "cpu", name) as lowered:  # type: ignore[arg-type]
        assert set(lowered.replaced) == {one.name for one in PASSES if name in one.modes}
        assert not isinstance(model.topology, CpuDecode)


def test_reference_lowers_nothing() -> None:
    model = lively("gqa_scaled")
    kinds = shape_of(model)
    kernels.load("cpu", "reference")
    with lower(model, "cpu", "decode") as lowered:
        assert lowered.replaced == {}
        assert shape_of(model) == kinds
    kernels.load("cpu", "auto")
    with lower(model, "cpu", "decode") as lowered:
        assert lowered.replaced["cpu_decode"] == 1


def test_a_pass_that_fails_leaves_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively("gqa_scaled")

    def fail(model: nn.Module, *, is_compiled: bool) -> list[object]:
        raise MemoryError

    monkeypatch.setattr(
        "caramba.lower.lowering.PASSES",
        (*PASSES, PASSES[-1]._replace(apply=fail)),  # type: ignore[arg-type]
    )
    with pytest.raises(MemoryError):
        lower(model, "cpu", "decode")
    assert not isinstance(model.topology, CpuDecode)


def test_a_hook_inside_a_lowered_model_is_refused_until_it_is_restored() -> None:
    model = lively("gqa_scaled")
    layer = model.attention_layers()[0][1]
    with lower(model, "cpu", "decode"):
        for register in (layer.register_forward_hook, layer.out.register_forward_pre_hook):
            with pytest.raises(ConfigError, match=r"lower: got a forward hook .*before generation begins"):
                register(lambda *_: None)
        with lower(model, "cpu", "decode"):
            pass  # an inner lowering ends no refusal
        with pytest.raises(ConfigError, match="forward hook"):
            layer.register_forward_hook(lambda *_: None)
        model.topology.register_forward_hook(lambda *_: None).remove()  # what is lowered runs its own
    layer.register_forward_hook(lambda *_: None).remove()
    assert not any("register_forward_hook" in module.__dict__ for module in model.modules())
