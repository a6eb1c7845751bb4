"""Small teachers and students for surgery tests: two blocks of width 32, four query heads on two key/value heads."""

from __future__ import annotations

import torch
from torch import Tensor

from caramba.config.model import ModelSpec
from caramba.model import Model, build_model
from caramba.surgery import Calibration, CalibrationText, calibrate

M, HEADS, KV, DIM, VOCAB = 32, 4, 2, 8, 40


def spec(depth: int = 2, **attention: object) -> ModelSpec:
    node = {
        "type": "AttentionLayer",
        "d_model": M,
        "n_heads": HEADS,
        "n_kv_heads": KV,
        "head_dim": DIM,
        "mode": "gqa",
    } | attention
    norm = {"type": "RMSNormLayer", "d_model": M}
    feed_forward = {"type": "SwiGLULayer", "d_model": M, "d_ff": 48}
    block = [
        {"type": "ResidualTopology", "layers": [norm, node]},
        {"type": "ResidualTopology", "layers": [norm, feed_forward]},
    ]
    layers = [{"type": "NestedTopology", "repeat": depth, "layers": block}, norm]
    return ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": VOCAB, "d_model": M},
            "topology": {"type": "StackedTopology", "layers": layers},
        }
    )


def latent_spec(sem: int, geo: int, **extra: object) -> ModelSpec:
    return spec(mode="decoupled", layout="latent", sem_dim=sem, geo_dim=geo, **extra)


def per_head_spec(sem: int, geo: int, v: int, **extra: object) -> ModelSpec:
    return spec(mode="decoupled", sem_dim=sem, geo_dim=geo, v_dim=v, **extra)


def loud(model: Model) -> Model:
    """Weights large enough that attention is far from uniform, biases included."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.mul_(12.0)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def make_teacher(seed: int = 3, **attention: object) -> Model:
    return loud(build_model(spec(**attention), seed=seed)).double().eval()


def tokens(n: int, length: int, seed: int) -> Tensor:
    return torch.randint(VOCAB, (n, length), generator=torch.Generator().manual_seed(seed))


def calibrated(teacher: Model) -> Calibration:
    return calibrate(teacher, CalibrationText(tokens(24, 24, 1), tokens(6, 24, 2)))
