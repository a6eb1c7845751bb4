"""Ranges of activations, the layers that are chosen, and what is refused: nothing here loads torchao."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError
from tests.unit.model.model_specs import VOCAB, transformer
from torch import nn

from caramba.config.benchmark import CalibrationConfig, WeightFormat
from caramba.config.model import ModelSpec
from caramba.errors import ConfigError, DataError, KernelUnavailable
from caramba.lower import quantize
from caramba.lower.quantize import format_refusal, linear_layers, observe_ranges, quantise_weights
from caramba.model import build_model
from caramba.model.model import model_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("method", ["max", "percentile"])
def test_ranges_are_those_of_all_activations_together(method: str) -> None:
    model = build_model(transformer("gqa_scaled"), seed=0)
    windows = list(torch.randint(VOCAB, (6, 20), generator=torch.Generator().manual_seed(0)))
    found = linear_layers(model, WeightFormat.INT8_DYNAMIC, CPU, with_head=True)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in found.layers if name != "head"}
    hooks = [
        found.layers[name].register_forward_pre_hook(lambda _, x, to=to: to.append(x[0].flatten(0, -2).abs()))
        for name, to in seen.items()
    ]
    config = CalibrationConfig.model_validate(
        {"method": method} | ({"percentile": 95.0} if method == "percentile" else {})
    )
    ranges = observe_ranges(model, found.layers, windows, config)
    for hook in hooks:
        hook.remove()
    assert ranges.tokens == 120
    for name, parts in seen.items():
        every = torch.cat(parts).sort(dim=0, descending=True).values
        # 5% of 120 values is 6: the sixth largest.
        assert torch.equal(ranges.of[name], every[0 if method == "max" else 5])
    with torch.no_grad():
        hidden = torch.cat([model.hidden(window[None])[0] for window in windows]).abs()
    kth = hidden.topk(1 if method == "max" else 6, dim=0).values[-1]
    torch.testing.assert_close(ranges.of["head"], kth)
    with pytest.raises(DataError, match="no text to take ranges from"):
        observe_ranges(model, found.layers, [], config)


def test_layers_follow_the_topology() -> None:
    model = build_model(transformer("decoupled_gate"), seed=0)
    found = linear_layers(model, WeightFormat.INT8, CPU)
    ends = {name.rpartition(".")[2] for name in found.layers}
    assert {"q_sem", "q_geo", "k_geo", "v", "out", "gate", "up", "down"} <= ends
    assert set(found.kept.values()) == {"a gate, one output per head"}
    assert "head" not in found.layers
    narrow = linear_layers(model, WeightFormat.INT4, torch.device("cuda"), with_head=True)
    assert not narrow.layers
    assert narrow.kept["head"].endswith("inputs, not a multiple of 32")
    odd = ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": 11, "d_model": 12},
            "topology": {
                "type": "SequentialTopology",
                "layers": [{"type": "LinearLayer", "d_in": 12, "d_out": 12}],
            },
        }
    )
    found = linear_layers(build_model(odd, seed=0), WeightFormat.INT8_DYNAMIC, torch.device("cuda"))
    assert set(found.kept.values()) == {"12 x 12, not multiples of 8"}


def test_bytes_are_those_of_storage_a_tied_weight_once() -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(4, 3))
    model.b = model.a
    model.register_buffer("c", torch.zeros(5, dtype=torch.int8))
    assert model_bytes(model) == 4 * 3 * 4 + 5


def test_refusals_name_device_type_and_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "torchao has no kernel for mps" in (format_refusal(WeightFormat.INT8, torch.device("mps")) or "")
    for form in WeightFormat:
        assert format_refusal(form, CPU) is None
    model = build_model(transformer("standard"), seed=0)

    class Shared(nn.Linear):
        """As layers are that ranks share."""

    model.set_submodule("shared", Shared(32, 8))
    with pytest.raises(KernelUnavailable, match=r"shared layer needs a CUDA device, .* use weights=int8 .shared is a"):
        quantise_weights(model, WeightFormat.INT4)
    with monkeypatch.context() as without:
        without.setattr(quantize.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(KernelUnavailable, match=r"pip install 'caramba\[quantise\]'"):
            quantise_weights(model, WeightFormat.INT8)
    with pytest.raises(ValidationError, match="percentile=99 is of method=percentile, got method=max"):
        CalibrationConfig.model_validate({"percentile": 99.0})
    assert CalibrationConfig.model_validate(CalibrationConfig().model_dump()).tokens == 2048
    monkeypatch.setattr("caramba.lower.quantize.load_torchao", lambda: None)
    with pytest.raises(ConfigError, match="needs the ranges of activations"):
        quantise_weights(model, WeightFormat.INT8_DYNAMIC)
