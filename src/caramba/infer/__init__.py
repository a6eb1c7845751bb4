"""Inference: opening a trained model, generating text, prefill and decode with a cache, scores of given text."""

from caramba.config.generate import GenerateConfig, SpeculativeConfig
from caramba.infer.decode import decode_step, greedy, prefill
from caramba.infer.eval_text import EvalText
from caramba.infer.generator import Generated, GenerateStats, Generator, generate
from caramba.infer.load_model import ModelBundle, load_model
from caramba.infer.policy import CacheDecision
from caramba.infer.scoring import Scored, greedy_until, score_continuations
from caramba.infer.speculative import SpeculativeGenerator

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
    "prefill",
    "score_continuations",
]
