"""Quantised weights on a CUDA device: every format, beside the model in bfloat16."""

from __future__ import annotations

import copy

import pytest
import torch

from caramba.config.benchmark import CalibrationConfig, WeightFormat
from caramba.config.model import ModelSpec
from caramba.infer import Generator
from caramba.lower.quantize import linear_layers, observe_ranges, quantise_weights
from caramba.model import Model, build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUNDS = {
    WeightFormat.INT8: (0.03, 0.62),
    WeightFormat.INT8_DYNAMIC: (0.04, 0.62),
    WeightFormat.INT4: (0.25, 0.4),
}


@pytest.fixture(scope="module")
def model() -> Model:
    norm = {"type": "RMSNormLayer", "d_model": 1024}
    attention = {"type": "AttentionLayer", "mode": "gqa", "d_model": 1024, "n_heads": 16, "n_kv_heads": 4}
    mlp = {"type": "SwiGLULayer", "d_model": 1024, "d_ff": 2048}
    layers = [{"type": "ResidualTopology", "layers": [norm, layer]} for layer in (attention, mlp)]
    spec = ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": 256, "d_model": 1024},
            "topology": {"type": "StackedTopology", "layers": [*layers, norm]},
            "head": {"tied": True},
        }
    )
    return build_model(spec, seed=0).eval().to("cuda", torch.bfloat16)


@torch.inference_mode()
@pytest.mark.parametrize("form", list(WeightFormat))
def test_logits_stay_near_and_bytes_fall(model: Model, form: WeightFormat) -> None:
    pytest.importorskip("torchao")
    tokens = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
    wanted, changed = model(tokens).float(), copy.deepcopy(model)
    found = linear_layers(changed, form, torch.device("cuda"))
    ranges = observe_ranges(changed, found.layers, list(tokens), CalibrationConfig())
    done = quantise_weights(changed, form, ranges=ranges)
    error = (changed(tokens).float() - wanted).norm() / wanted.norm()
    most, share = BOUNDS[form]
    assert 0 < error < most
    assert done.bytes_after < share * done.bytes_before
    plain, prompts = Generator(changed, compiled=False, max_new_tokens=8, temperature=0.0), [[1, 2, 3, 4]]
    wanted_tokens = plain.generate(prompts)[0].tokens
    for compiled, ran in (("graph", "graph"), (True, "compiled graph")):
        generator = Generator(changed, compiled=compiled, max_new_tokens=8, temperature=0.0)
        found_tokens = generator.generate(prompts)[0].tokens
        assert generator.stats.decode == ran
        assert len(found_tokens) == 8
        assert compiled is True or found_tokens == wanted_tokens  # compiled code rounds otherwise


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_int4_takes_other_types(model: Model, dtype: torch.dtype) -> None:
    pytest.importorskip("torchao")
    changed = copy.deepcopy(model).to(dtype)
    tokens = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(0)).cuda()
    wanted = changed(tokens).float()
    quantise_weights(changed, WeightFormat.INT4, with_head=True)
    error = (changed(tokens).float() - wanted).norm() / wanted.norm()
    assert 0 < error < 0.3, "the head, too: 0.25 of weights drawn at random"
    generators = [
        Generator(changed, compiled=compiled, max_new_tokens=8, temperature=0.0) for compiled in ("graph", False)
    ]
    found = [one.generate([[1, 2, 3, 4]])[0].tokens for one in generators]
    assert found[0] == found[1]
