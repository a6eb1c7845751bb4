"""Inference: opening a trained model, generating text, prefill and decode with a cache, scores of given text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from caramba.exports import lazy_exports

if TYPE_CHECKING:
    from caramba.config.generate import GenerateConfig, SpeculativeConfig
    from caramba.infer.decode import decode_step, greedy, prefill
    from caramba.infer.eval_text import EvalText
    from caramba.infer.generator import Generated, GenerateStats, Generator, generate
    from caramba.infer.model_bundle import ModelBundle, load_model
    from caramba.infer.policy import CacheDecision
    from caramba.infer.scoring import Scored, greedy_until, score_continuations
    from caramba.infer.speculative import SpeculativeGenerator
    from caramba.infer.state_file import load_state, save_state

__all__ = [
    "CacheDecision",
    "EvalText",
    "GenerateConfig",
    "GenerateStats",
    "Generated",
    "Generator",
    "ModelBundle",
    "Scored",
    "SpeculativeConfig",
    "SpeculativeGenerator",
    "decode_step",
    "generate",
    "greedy",
    "greedy_until",
    "load_model",
    "load_state",
    "prefill",
    "save_state",
    "score_continuations",
]

__getattr__ = lazy_exports(__name__, __file__)
