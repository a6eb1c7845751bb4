"""Small trained-looking models, run directories that hold one and folders exported from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from caramba.cli import main
from caramba.config.manifest import parse_manifest
from caramba.config.model import ModelConfig, ModelSpec
from caramba.data import ByteTokenizer, Tokenizer, write_token_folder
from caramba.model import Model, build_model, save_model
from caramba.runs import MANIFEST, canonical_json

VOCAB, M = 257, 32
TOLERANCE = 1e-4
NORM = {"type": "RMSNormLayer", "d_model": M}
MLP = {"type": "SwiGLULayer", "d_model": M, "d_ff": 48}
GQA = {"type": "AttentionLayer", "d_model": M, "n_heads": 4, "n_kv_heads": 2, "mode": "gqa"}
DBA = {
    "type": "AttentionLayer",
    "d_model": M,
    "n_heads": 4,
    "n_kv_heads": 2,
    "mode": "decoupled",
    "sem_dim": 4,
    "geo_dim": 8,
    "v_dim": 12,
}
LATENT = {
    "type": "AttentionLayer",
    "d_model": M,
    "n_heads": 4,
    "mode": "decoupled",
    "layout": "latent",
    "sem_dim": 12,
    "geo_dim": 4,
}
FIRST = {**LATENT, "n_kv_heads": 2, "exact_first_tokens": 3}
SLOTS = {**GQA, "type": "MemoryBankLayer", "local_window": 9, "memory_slots": 4}
GATED = {"memory_read": "gated", "memory_rope": True, "use_adaptive_compression": True}
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32}


def block(attention: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "ResidualTopology", "layers": [NORM, attention]},
        {"type": "ResidualTopology", "layers": [NORM, MLP]},
    ]


def spec(*nodes: dict[str, Any], tied: bool = True) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "embedder": {"vocab_size": VOCAB, "d_model": M},
            "topology": {"type": "StackedTopology", "layers": [*nodes, NORM]},
            "head": {"tied": tied},
        }
    )


def transformer(attention: dict[str, Any], tied: bool = True) -> ModelSpec:
    return spec({"type": "NestedTopology", "repeat": 2, "layers": block(attention)}, tied=tied)


REMOTE = {
    "dba": transformer(DBA),
    # One latent wider than a head, one narrower: both forms of the layer, in prefill and in decode.
    "latent": spec(
        *block(LATENT),
        *block({**LATENT, "sem_dim": 6, "null_attn": True, "decoupled_gate": True, "bias": True}),
    ),
    "cache format": spec(*block({**LATENT, "cache_format": "mixed"}), *block({**GQA, "cache_format": "q8_0"})),
    "first tokens": spec(*block(FIRST), *block({**FIRST, "sem_dim": 6, "bias": True})),
    "memory slots": spec(*block(SLOTS), *block({**SLOTS, **GATED}), *block(GQA)),
    "gates": transformer({**DBA, "decoupled_gate": True, "decoupled_gate_dynamic": True, "qk_norm": True}, tied=False),
    "every topology": spec(
        {"type": "CyclicTopology", "n_cycles": 2, "layers": block(DBA)},
        {"type": "RecurrentTopology", "steps": 2, "layers": block({**GQA, "learned_temperature": True})},
        {
            "type": "SequentialTopology",
            "layers": [
                {"type": "ParallelTopology", "layers": [MLP, {**GQA, "local_window": 5}]},
                {"type": "LinearLayer", "d_in": M, "d_out": M, "reduce": "mean"},
                {"type": "BranchingTopology", "layers": [NORM, {"type": "LayerNormLayer", "d_model": M}]},
                {"type": "LinearLayer", "d_in": 2 * M, "d_out": M},
                {"type": "DropoutLayer", "p": 0.5},
            ],
        },
    ),
}
"""Models of no architecture that transformers has."""


def loud(spec: ModelSpec, seed: int = 3) -> Model:
    """A model whose every tensor, norms, gates and biases included, says something."""
    model = build_model(spec, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.3 if parameter.dim() > 1 else 0.2
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make_run(
    root: Path,
    model: Model,
    *,
    tokenizer: Tokenizer | None = None,
    role: str = "student",
    block_size: int = 64,
) -> Path:
    """Write what a finished run leaves of one model: manifest, tokens with their tokenizer, weights."""
    tokenizer = tokenizer or ByteTokenizer()
    text = ["the cat sat on the mat. " * 40, "a dog ran in the park. " * 40]
    tokens = root / "tokens"
    if not tokens.exists():
        write_token_folder(tokens, {"train": text, "val": ["the cat ran. " * 40]}, tokenizer, {"name": "cats"})
    run = root / "runs" / "sample" / f"one-{role}"
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    train = {"phase": "pretrain", "steps": 1, "batch_size": 1, "block_size": block_size}
    manifest = parse_manifest(
        {
            "name": "sample",
            "model": ModelConfig.model_validate(model.spec.model_dump(mode="json")).model_dump(mode="json"),
            "groups": [
                {
                    "name": "main",
                    "data": {"type": "tokens", "path": str(tokens)},
                    "runs": [{"id": "pretrain", "train": train}],
                }
            ],
        }
    )
    (run / MANIFEST).write_text(canonical_json(manifest))
    save_model(
        model,
        run / "checkpoints/pretrain.safetensors",
        role=role,
        phase="pretrain",
        labels={"proxy": "untrained"},
        tokenizer_hash=tokenizer.hash,
    )
    return run


def exported(tmp_path: Path, run: Path, *words: str, name: str = "out") -> Path:
    folder = tmp_path / name
    assert main(["export", str(run), "--out", str(folder), *words]) == 0
    return folder


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))
